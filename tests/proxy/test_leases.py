"""Instances that join a running gateway stay as long as they renew their lease."""

import asyncio
import re
import socket

import pytest
from certificates import Authority
from gateway_settings import admin_plane, gateway_settings
from servers import served

from epd_serve.errors import Conflict
from epd_serve.rpc import joining as joining_module
from epd_serve.rpc.admin import AdminClient, AdminRefused
from epd_serve.rpc.joining import join_all, keep_lease
from proxy.fleet import Fleet, NoSuchInstance


class Requests:
    """Running requests: notes the instances that they had to leave."""

    def __init__(self):
        self.moved = []

    def lose_instance(self, name):
        self.moved.append(name)


def joined_fleet(clock):
    fleet = Fleet(gateway_settings(), [], lambda *_: None, clock=clock)
    fleet.watchers.add(requests := Requests())
    return fleet, requests


def names(fleet):
    return [record.name for record in fleet.table]


def test_a_lease_ends_unless_it_is_renewed():
    now = [100.0]
    fleet, requests = joined_fleet(lambda: now[0])
    assert fleet.join("d7", "http://a:1", 10)
    assert not fleet.join("d7", "http://a:1", 10)

    def wait(seconds):
        for _ in range(round(seconds / 0.25)):
            now[0] += 0.25
            fleet.expire_leases()

    wait(9)
    fleet.join("d7", "http://a:1", 10)
    wait(9)
    assert names(fleet) == ["d7"]
    now[0] += 1000
    fleet.expire_leases()
    assert names(fleet) == ["d7"], "the gateway stood still: nobody could renew a lease"
    wait(9.75)
    assert names(fleet) == ["d7"]
    wait(0.25)
    assert not names(fleet) and requests.moved == ["d7"]
    assert fleet.join("d7", "http://b:1", 10), "the name is free again"
    fleet.leave("d7")
    assert not names(fleet) and requests.moved == ["d7"], "the second one has said it: its requests finish there"


def test_the_newer_of_two_instances_with_one_name_stays():
    fleet, _ = joined_fleet(lambda: 100.0)
    fleet.join("d7", "http://a:1", 10, incarnation=2)
    with pytest.raises(Conflict, match="at http://a:1 has joined"):
        fleet.join("d7", "http://b:1", 10, incarnation=1)
    assert fleet.join("d7", "http://b:1", 10, incarnation=3), "it need not wait for the older one's lease to end"
    with pytest.raises(NoSuchInstance):
        fleet.leave("d7", 2)
    assert names(fleet) == ["d7"], "who leaves late takes no newer one out"
    with pytest.raises(Conflict, match="at http://b:1 has joined"):
        fleet.join("d7", "http://a:1", 10, incarnation=2)


async def test_an_instance_joins_serves_and_leaves(start, kit):
    gateway = await start("a0:EPD", "spare:EPD", admin=admin_plane(key="secret"))

    async def shown():
        names = re.findall(r'^epd_serve_instance_ready\{instance="(\w+)"', await gateway.text("/metrics"), re.M)
        return set(names)

    url, spare = gateway.app.state.admin_url, gateway["spare"].url
    gateway.become([("a0", gateway["a0"].url)])
    assert [record.name for record in gateway.table] == ["a0"]
    key = {"authorization": "Bearer secret"}
    joining = asyncio.create_task(keep_lease(url, "late", spare, key, lease_s=60))
    await gateway.until(lambda: gateway.table.get("late") is not None and gateway.table["late"].ready)
    gateway.become([("a0", gateway["a0"].url)])
    assert gateway.table.get("late") is not None, "what is read again from the file leaves it alone"
    assert await asyncio.gather(*(gateway.answer(kit.chat()) for _ in range(6))) == [(200, kit.WHOLE)] * 6
    assert gateway["spare"].calls
    assert await shown() == {"a0", "late"}
    joining.cancel()
    await asyncio.gather(joining, return_exceptions=True)
    assert gateway.table.get("late") is None
    assert await shown() == {"a0"}, "who has left has no state"
    for body, headers, status in (
        ({"name": "x0", "url": spare}, {}, 401),
        ({"name": "a0", "url": spare}, key, 409),
        ({"name": "x0", "url": "nowhere"}, key, 400),
        ({"name": "x0", "url": spare, "lease_s": 0}, key, 400),
        ({"name": "x0", "url": "http://127.0.0.1:99999"}, key, 400),
    ):
        async with gateway.session.post(f"{url}/instances", json=body, headers=headers) as answer:
            assert answer.status == status, await answer.text()
    gateway.become([("a0", gateway["a0"].url)])
    async with gateway.session.delete(f"{url}/instances/late", headers=key) as answer:
        assert answer.status == 404


KEY = "0123456789abcdef-"


async def test_joining_needs_a_secret(start, kit):
    gateway = await start("a0:EPD", "stranger:EPD", admin=admin_plane())
    gateway.become([("a0", gateway["a0"].url)])
    url = gateway.app.state.admin_url
    body = {"name": "x0", "url": gateway["stranger"].url}
    async with gateway.session.post(f"{url}/instances", json=body) as answer:
        said = (await answer.json())["error"]
        assert (answer.status, said["code"]) == (403, "secret_required")
        assert "set cluster_key" in said["message"] and "EPD_SERVE_CLUSTER_KEY" in said["message"]
    async with gateway.session.delete(f"{url}/instances/a0") as answer:
        assert answer.status == 403
    async with gateway.session.get(f"{url}/instances") as answer:
        assert answer.status == 200, "who looks needs none where there is no key"
    assert await asyncio.gather(*(gateway.answer(kit.chat()) for _ in range(6))) == [(200, kit.WHOLE)] * 6
    assert not gateway["stranger"].calls


async def test_with_a_cluster_key_joining_proves_it_and_strangers_get_no_prompt(start, kit):
    gateway = await start("a0:EPD", "stranger:EPD", admin=admin_plane(key="secret"))
    good, stranger = gateway["a0"], gateway["stranger"]
    async with served(good.server(KEY)) as inside:
        other = await start(admin=admin_plane(key="secret"), cluster_key=KEY)
        url = other.app.state.admin_url
        joinings = [
            asyncio.create_task(keep_lease(url, name, at, headers, key=key))
            for name, at, headers, key in (
                ("late", inside, {}, KEY),
                ("wrong", stranger.url, {}, "another-key-of-somebody"),
                ("plain", stranger.url, {}, None),
                ("admin", stranger.url, {"authorization": "Bearer secret"}, None),
            )
        ]
        await other.until(lambda: other.table.get("late") is not None and other.table["late"].ready)
        await other.until(lambda: other.table.get("admin") is not None)
        assert await asyncio.gather(*(other.answer(kit.chat()) for _ in range(40))) == [(200, kit.WHOLE)] * 40
        assert {record.name for record in other.table} == {"late", "admin"}, "the admin's key may add others"
        assert not other.table["admin"].ready, "but it proves nothing"
        assert good.got("/stage/prefill") and not stranger.calls
        for joining in joinings:
            joining.cancel()
        await asyncio.gather(*joinings, return_exceptions=True)
        assert not list(other.table)


async def test_an_instance_whose_lease_ends_loses_its_stream(start, kit):
    gateway = await start("a0:EPD", "late:EPD", admin=admin_plane(key="secret"))
    late = gateway["late"]
    gateway.become([])
    late.scripts["/stage/prefill"] = lambda _: [kit.FRAMES, kit.frame(1), kit.FOREVER]
    gateway["a0"].scripts["/stage/prefill"] = lambda message: [kit.FRAMES, kit.frame(2), kit.frame(0, end=True)]
    lease = {"name": "late", "url": late.url, "lease_s": 3}
    url, key = f"{gateway.app.state.admin_url}/instances", {"authorization": "Bearer secret"}
    async with gateway.session.post(url, json=lease, headers=key) as answer:
        assert answer.status == 201
    await gateway.until(lambda: gateway.table["late"].ready)
    stream = asyncio.create_task(gateway.answer(kit.chat(stream=True)))
    await gateway.until(lambda: late.got("/stage/prefill"))
    gateway.become([("a0", gateway["a0"].url)])
    await gateway.until(lambda: gateway.table.get("late") is None)
    assert await stream == (200, kit.events_of(kit.frame(1) + kit.frame(2)) + kit.DONE)


async def test_an_instance_joins_over_tls_and_a_plain_url_is_refused(start, tmp_path, monkeypatch):
    tls = Authority(tmp_path).files("ours")
    for name, value in tls.environment.items():
        monkeypatch.setenv(name, value)
    gateway = await start(admin=admin_plane(key="secret"), startup_wait_s=0)
    url, key = gateway.app.state.admin_url, {"authorization": "Bearer secret"}
    assert url.startswith("https://")
    admin = AdminClient(url, key)
    assert (await admin.ask("GET", "/instances"))["instances"] == []
    with pytest.raises(AdminRefused, match="is not https; this deployment uses tls"):
        await admin.ask("POST", "/instances", {"name": "x0", "url": "http://127.0.0.1:9", "role": "EPD"})
    joining = asyncio.create_task(join_all([url], "late", "https://127.0.0.1:9", key, role="EPD", tls=tls))
    await gateway.until(lambda: gateway.table.get("late") is not None)
    joining.cancel()
    await asyncio.gather(joining, return_exceptions=True)
    assert gateway.table.get("late") is None


async def test_a_failed_lookup_ends_no_lease(start, monkeypatch):
    monkeypatch.setattr(joining_module, "_RESOLVE_S", 0.05)
    known, num_lookups = socket.getaddrinfo, 0

    def look_up(host, *arguments, **options):
        nonlocal num_lookups
        if host != "gateway.example":
            return known(host, *arguments, **options)
        num_lookups += 1
        if num_lookups > 1:
            raise socket.gaierror(socket.EAI_AGAIN, "try again")
        return known("127.0.0.1", *arguments, **options)

    gateway = await start(admin=admin_plane(key="secret"), cluster_key=KEY, startup_wait_s=0)
    url = gateway.app.state.admin_url.replace("127.0.0.1", "gateway.example")
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    joining = asyncio.create_task(join_all([url], "late", "http://127.0.0.1:9", {}, role="EPD", key=KEY))
    await gateway.until(lambda: gateway.table.get("late") is not None)
    record = gateway.table["late"]
    await gateway.until(lambda: num_lookups > 4)
    assert gateway.table.get("late") is record
    joining.cancel()
    await asyncio.gather(joining, return_exceptions=True)
    assert gateway.table.get("late") is None
