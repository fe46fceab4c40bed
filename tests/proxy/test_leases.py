"""Instances that join a running gateway stay as long as they renew their lease."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from epd_serve.errors import Conflict
from epd_serve.instance.joining import Joining
from proxy.leases import Leases
from proxy.settings import AdminSettings


class Members:
    def __init__(self) -> None:
        self.here: set[str] = set()

    def join(self, name: str, url: str) -> None:
        self.here.add(name)

    def leave(self, name: str) -> None:
        self.here.remove(name)


def test_a_lease_ends_unless_it_is_renewed() -> None:
    members, now = Members(), [100.0]
    leases = Leases(members, lambda: now[0])  # type: ignore[arg-type]
    assert leases.join("d7", "http://a:1", 10)
    assert not leases.join("d7", "http://a:1", 10)
    with pytest.raises(Conflict, match="at http://a:1 has joined"):
        leases.join("d7", "http://b:1", 10)

    def wait(seconds: float) -> None:
        for _ in range(round(seconds / 0.25)):
            now[0] += 0.25
            leases.expire()

    wait(9)
    leases.join("d7", "http://a:1", 10)
    wait(9)
    assert members.here == {"d7"}
    now[0] += 1000
    leases.expire()
    assert members.here == {"d7"}, "the gateway stood still: nobody could renew a lease"
    wait(9.75)
    assert members.here == {"d7"}
    wait(0.25)
    assert not members.here
    assert leases.join("d7", "http://b:1", 10), "the name is free again"


async def test_an_instance_joins_serves_and_leaves(start: Any, kit: Any, caplog: pytest.LogCaptureFixture) -> None:
    gateway = await start("a0:EPD", "spare:EPD", admin=AdminSettings(key="secret"))

    async def shown() -> set[str]:
        async with gateway.session.get(f"{gateway.url}/metrics") as answer:
            return set(
                re.findall(r'^epd_serve_instance_ready\{instance="(\w+)"\}', await answer.text(), re.MULTILINE)
            )

    url, spare = gateway.app.state.admin_url, gateway["spare"].url
    gateway.app.state.control.apply(gateway.app.state.control.settings, [("a0", gateway["a0"].url)])
    assert [record.name for record in gateway.table] == ["a0"]
    key = {"authorization": "Bearer secret"}
    joining = asyncio.create_task(Joining(url, "late", spare, key, lease_s=60).run())
    await gateway.until(lambda: gateway.table.get("late") is not None and gateway.table["late"].ready)
    gateway.app.state.control.apply(gateway.app.state.control.settings, [("a0", gateway["a0"].url)])
    assert gateway.table.get("late") is not None, "what is read again from the file leaves it alone"
    assert await asyncio.gather(*(gateway.answer(kit.chat()) for _ in range(6))) == [(200, kit.WHOLE)] * 6
    assert gateway["spare"].calls
    assert await shown() == {"a0", "late"}
    twin = asyncio.create_task(Joining(url, "late", gateway["a0"].url, key).run())
    await gateway.until(lambda: "has joined; take another name" in caplog.text)
    twin.cancel()
    await asyncio.gather(twin, return_exceptions=True)
    assert gateway.table.get("late") is not None, "one that was refused takes nobody out"
    joining.cancel()
    await asyncio.gather(joining, return_exceptions=True)
    assert gateway.table.get("late") is None
    assert await shown() == {"a0"}, "who has left has no state"
    for body, headers, status, message in (
        ({"name": "x0", "url": spare}, {}, 401, "key"),
        ({"name": "a0", "url": spare}, key, 409, "of its own"),
        ({"name": "x0", "url": "nowhere"}, key, 400, "url"),
        ({"name": "x0", "url": spare, "lease_s": 0}, key, 400, "lease_s"),
        ({"name": "x0", "url": "http://127.0.0.1:99999"}, key, 400, "cannot join"),
    ):
        async with gateway.session.post(f"{url}/instances", json=body, headers=headers) as answer:
            said = await answer.json()
            assert answer.status == status and message in said["error"]["message"], said
    gateway.app.state.control.apply(gateway.app.state.control.settings, [("a0", gateway["a0"].url)])
    async with gateway.session.delete(f"{url}/instances/late", headers=key) as answer:
        assert answer.status == 404
