"""The messages of workers through their parent, here in one process with their sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from aiohttp import web
from fastapi import FastAPI
from instance_info import instance_info

from epd_serve.backends.native import NativeConnections
from epd_serve.backends.vllm import VllmInstances
from epd_serve.backends.vllm_server import VllmTarget
from epd_serve.config import GatewayConfig
from epd_serve.errors import StageTimeout
from epd_serve.protocol.instance_state import RoleOrder
from epd_serve.routing.table import InstanceTable
from epd_serve.types import Role
from proxy.admin.plane import create_admin_app
from proxy.admin.rollout import rollout_router, show_ready
from proxy.admin.shared_state import follow
from proxy.admin.switches import Hold, Switches
from proxy.admission.control import AdmissionControl
from proxy.admission.keys import Authenticator
from proxy.admission.ledger import Ledger
from proxy.admission.queue import AdmissionQueue
from proxy.api.views import health_router
from proxy.fleet.health import Health
from proxy.fleet.leases import Leases
from proxy.http.asgi import install_error_handlers
from proxy.observe.metrics import GatewayMetrics
from proxy.settings import Current, GatewaySettings
from proxy.workers import crew as crew_module
from proxy.workers import parent as parent_module
from proxy.workers.channel import Channel
from proxy.workers.crew import Crew, Drained, Joined, Left, Shared, Switched, TakenOver
from proxy.workers.parent import Hub
from proxy.workers.worker_setup import WorkerSetup

D0 = Drained("d0", "http://127.0.0.1:1", True)


@pytest.fixture
async def crews() -> AsyncIterator[Callable[..., Any]]:
    """``await crews(2)`` → (hub, two crews that have joined it)."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(count: int) -> tuple[Hub, list[Crew]]:
            hub, made = Hub(), []
            descriptor, _ = Ledger.create(count)
            for index in range(count):
                ours, theirs = socket.socketpair()
                channel = hub.connect(index, asyncio.Event())
                await channel.open(ours)
                serving = asyncio.create_task(channel.run())
                stack.callback(serving.cancel)
                setup = WorkerSetup(
                    index=index,
                    count=count,
                    config=-1,
                    channel=theirs.detach(),
                    ledger=descriptor,
                    listeners=(),
                )
                crew = Crew(setup)
                await crew.join()
                stack.push_async_callback(crew.leave)
                made.append(crew)
            return hub, made

        yield start


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (crew_module, parent_module):
        monkeypatch.setattr(module, "ANSWER_S", 120)


class StandsStill:
    """Worker 7 of a hub, which answers nothing; ``told`` says that it was asked."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.told = asyncio.Event()

    async def _hang(self, _: bytes) -> bytes:
        self.told.set()
        await asyncio.Event().wait()
        return b""

    async def __aenter__(self) -> StandsStill:
        ours, theirs = socket.socketpair()
        at_hub = self.hub.connect(7, asyncio.Event())
        itself = Channel({"change": self._hang, "show": self._hang})
        await at_hub.open(ours)
        await itself.open(theirs)
        self._running = [asyncio.create_task(channel.run()) for channel in (at_hub, itself)]
        await itself.call("join", timeout_s=120)
        return self

    def die(self) -> None:
        self.hub.left(7)
        self._running[0].cancel()

    async def __aexit__(self, *_: object) -> None:
        self.die()
        self._running[1].cancel()
        await asyncio.gather(*self._running, return_exceptions=True)


async def test_who_shares_a_change_learns_which_workers_have_not_confirmed_it(crews, monkeypatch):
    hub, (first, second) = await crews(2)
    taken = []
    second.on_drained = taken.append
    assert await first.share(D0) == [] and taken == [D0]
    async with StandsStill(hub) as still:
        monkeypatch.setattr(parent_module, "ANSWER_S", 0.2)
        assert 7 in await first.share(D0)
        monkeypatch.setattr(parent_module, "ANSWER_S", 120)
        still.told.clear()
        sharing = asyncio.create_task(first.share(D0))
        await still.told.wait()
        still.die()  # another one will know it
        assert await sharing == []


async def test_a_change_that_fails_on_its_way_is_confirmed_by_nobody(crews, monkeypatch):
    _, (first, second) = await crews(2)
    taken = []

    def fail(*_: object) -> None:
        raise RuntimeError("a fault")

    second.on_drained = fail
    assert await first.share(D0) == [1]
    second.on_drained = taken.append
    monkeypatch.setattr(Shared, "apply", fail)
    assert await first.share(D0) == [1] and not taken
    second.shown["worker"] = fail
    assert await first.ask_all("worker", dict) is None


async def test_an_answer_that_is_too_long_fails_its_call_alone(crews):
    _, (first, second) = await crews(2)
    second.shown["long"] = lambda: "x" * (65 << 20)
    assert await first.ask_all("long", str) is None
    second.shown["short"] = lambda: "y"
    assert await first.ask_all("short", str) == ["y"]


async def test_an_instance_is_ready_where_every_worker_says_so(crews, monkeypatch):
    hub, (first, second) = await crews(2)
    tables = [InstanceTable([("d0", D0.url)]) for _ in "12"]
    health = Health(tables[0], {}, Current(GatewaySettings()))
    switches = Switches(tables[0], {}, health, first)
    app = FastAPI()
    app.include_router(rollout_router(tables[0], switches, Hold(), first))
    show_ready(second, tables[1])
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

        async def ready() -> list[str]:
            return (await client.get("/ready")).json()["ready"]

        tables[0].update("d0", instance_info("d0"), contains=0)
        assert await ready() == []
        tables[1].update("d0", instance_info("d0"), contains=0)
        assert await ready() == ["d0"]
        async with StandsStill(hub):
            monkeypatch.setattr(parent_module, "ANSWER_S", 0.2)
            assert await ready() == [], "one may not know it"
            monkeypatch.setattr(parent_module, "ANSWER_S", 120)
        assert await ready() == ["d0"]


async def test_without_the_sum_of_all_workers_nobody_sees_the_counters_of_one(crews):
    hub, (first, second) = await crews(2)
    app = FastAPI()
    table, key = InstanceTable([]), Authenticator([])
    health = Health(table, {}, Current(GatewaySettings()))
    app.include_router(health_router(table, GatewayMetrics(), key, GatewayConfig(), first, health))
    install_error_handlers(app)
    second.shown["metrics"] = list
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert "epd_serve_requests_total" in (await client.get("/metrics")).text
        hub._retired = None  # a fault of the parent
        answer = await client.get("/metrics")
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "service_unavailable")


async def test_an_instance_that_joins_while_others_are_asked_is_shown(crews):
    _, (first, second) = await crews(2)
    table = InstanceTable([("d0", D0.url)])

    def joins() -> dict[str, dict[str, int]]:
        table.add("d1", "http://127.0.0.1:2")
        return {"d0": {"D": 1}}

    second.shown["in_flight"] = joins
    second.shown["worker"] = dict
    admission = AdmissionControl(Authenticator([]), AdmissionQueue(1, 1), settings=Current(GatewaySettings()))
    transport = httpx.ASGITransport(create_admin_app(table, admission, None, first))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        found = (await client.get("/instances")).json()["instances"]
    assert {one["name"]: one["in_flight"] for one in found} == {"d0": {"D": 1}, "d1": {}}


def test_a_drain_ends_with_its_instance():
    shared = Shared()
    joined = Joined("d0", D0.url, 10.0)
    for change, now_s in (
        (Left("d0"), 0.0),
        (Joined("d1", "http://127.0.0.1:2", 30.0), 20.0),  # by then the lease of d0 is over
        (Drained("d0", D0.url, False), 0.0),
        (TakenOver("{}", {"d0": "http://127.0.0.1:9"}), 20.0),
    ):
        shared.apply(joined, 0.0)
        shared.apply(D0, 0.0)
        shared.apply(TakenOver("{}", {"p0": "http://127.0.0.1:3"}), 0.0)
        assert list(shared.drained) == ["d0"], "it has joined, and is in no file"
        shared.apply(change, now_s)
        assert not shared.drained and D0 not in shared.changes()
    shared.apply(joined, 0.0)
    shared.apply(D0, 0.0)
    shared.expire(11.0)
    assert not shared.drained


def test_a_drain_of_an_instance_of_the_file_ends_when_the_file_has_another_one():
    for then, is_kept in (({"d0": D0.url, "d1": "x"}, True), ({"d0": "http://127.0.0.1:9"}, False), ({}, False)):
        shared = Shared()
        shared.apply(D0, 0.0)
        shared.apply(TakenOver("{}", then), 0.0)
        assert shared.changes() == [D0] * is_kept


@contextlib.asynccontextmanager
async def vllm_server(running: list[int]) -> AsyncIterator[str]:
    """As an idle vLLM server answers, but for ``running`` requests; yields its URL."""

    async def answer(request: web.Request) -> web.Response:
        if request.path.endswith("/metrics"):
            return web.Response(text=f"vllm:num_requests_running {running[0]}\nprocess_start_time_seconds 7\n")
        return web.json_response({"data": [{"id": "m", "max_model_len": 99}]})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_every_worker_uses_a_vllm_instance_that_is_switched_in_its_new_role(crews):
    """A process of vLLM does not know its role: the others learn it from the worker that had the order, and give
    the instance nothing new from before it is asked until it has the role."""
    _, (first, second) = await crews(2)
    running, given = [1], {"device": "cpu", "dtype": "float32", "model_path": "", "features": "store"}
    targets = {
        name: VllmTarget(role=Role.parse(name[0].upper()), kv="mooncake", **given) for name in ("p0", "p1", "d0")
    }
    async with vllm_server(running) as url, NativeConnections() as connections:
        calls, tables, healths = [], [], []
        for crew in (first, second):
            instances = VllmInstances(connections, targets)
            calls.append({name: instances.connect(name, f"{url}/{name}") for name in targets})
            tables.append(InstanceTable([(name, f"{url}/{name}") for name in targets]))
            for name, one in calls[-1].items():
                tables[-1].update(name, await one.info(), contains=0)
            healths.append(Health(tables[-1], calls[-1], Current(GatewaySettings())))
            admission = AdmissionControl(
                Authenticator([]), AdmissionQueue(1, 1), settings=Current(GatewaySettings())
            )
            follow(crew, tables[-1], calls[-1], admission, healths[-1], Leases(None))

        def roles() -> list[str]:
            return [str(one["p0"].target.role) for one in calls]

        def accepting() -> list[bool]:
            return [table.get("p0").accepting for table in tables]

        told, take_over = asyncio.Event(), second.on_switched

        def switched(change: Switched) -> None:
            take_over(change)
            told.set()

        second.on_switched = switched
        switches = Switches(tables[0], calls[0], healths[0], first)
        switching = asyncio.create_task(switches.order("p0", RoleOrder("D", deadline_s=60)))
        await told.wait()
        assert accepting() == [False, False] and roles() == ["P", "P"], "it has a request"
        running[0] = 0
        assert (await switching).new == "D"
        assert roles() == ["D", "D"] and accepting() == [True, True]
        assert (await calls[1]["p0"].info()).role == "D"
        running[0] = 1
        with pytest.raises(StageTimeout):
            await switches.order("p0", RoleOrder("P", deadline_s=0.1))
        assert roles() == ["D", "D"] and accepting() == [True, True], "it has not become empty"
