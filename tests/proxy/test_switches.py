"""Another role for an instance, ordered at the gateway: what may be, and what the table learns of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from epd_serve.protocol import wire
from epd_serve.protocol.wire import Load, Report, RoleChanged
from epd_serve.switch_command import switch
from proxy.settings import AdminSettings


@pytest.fixture
async def gateway(start: Any) -> Any:
    return await start("p0:P", "p1:P", "d0:D", reporting=True, admin=AdminSettings())


async def ordered(gateway: Any, name: str, **body: Any) -> tuple[int, dict[str, Any]]:
    url = f"{gateway.app.state.admin_url}/instances/{name}/role"
    async with gateway.session.post(url, json=body) as response:
        return response.status, await response.json()


async def test_orders_that_cannot_be_are_refused_by_name(gateway: Any) -> None:
    for name, body, status, message in (
        ("x9", {"role": "D"}, 404, "there are: p0, p1, d0"),
        ("p0", {"role": "Q"}, 400, "no stage"),
        ("p0", {}, 400, "role"),
        ("p0", {"role": "D", "deadline_s": -1}, 400, "deadline_s"),
        ("d0", {"role": "P"}, 409, "the only one that is ready for stage D"),
    ):
        answer = await ordered(gateway, name, **body)
        assert answer[0] == status and message in answer[1]["error"]["message"], answer
    assert all(record.accepting for record in gateway.table)


async def test_a_new_epoch_is_asked_about_before_it_gets_work(gateway: Any) -> None:
    p1 = gateway["p1"]
    p1.report = lambda: Report(load=Load(), ready=False)
    await gateway.until(lambda: not gateway.table["p1"].ready)
    p1.role = "D"
    p1.info = {"epoch": 1}
    p1.report = lambda: Report(load=Load(), ready=True, epoch=1)
    await gateway.until(lambda: gateway.table["p1"].ready)
    assert str(gateway.table["p1"].role) == "D" and gateway.table.epoch("p1") == 1


async def test_a_planned_departure_counts_against_nobody(gateway: Any, kit: Any) -> None:
    refused: list[int] = []

    def leaves(message: Any) -> Any:
        refused.append(1)
        return kit.fail(503, "instance p0 is leaving its role", code="draining")

    gateway["p0"].scripts["/stage/prefill"] = leaves
    answers = await asyncio.gather(*(gateway.answer(kit.chat()) for _ in range(12)))
    assert answers == [(200, kit.WHOLE)] * 12 and refused
    assert gateway.app.state.health.describe("p0")["breaker"] == "closed"


async def test_the_command_says_what_the_admin_plane_says(
    start: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = await start("p0:P", "p1:P", "d0:D", admin=AdminSettings(key="secret"))
    address = gateway.app.state.admin_url
    for key, name, where, message in (
        (None, "d0", address, "EPD_SERVE_ADMIN_KEY"),
        ("secret", "d0", address, "the only one that is ready for stage D"),
        ("secret", "x9", address, "there are: p0, p1, d0"),
        ("secret", "d0", "http://127.0.0.1:9", "gateway.admin.port"),
    ):
        monkeypatch.setenv("EPD_SERVE_ADMIN_KEY", key) if key else monkeypatch.delenv("EPD_SERVE_ADMIN_KEY", False)
        with pytest.raises(ValueError) as refused:
            await asyncio.to_thread(switch, name, "P", where)
        assert message in str(refused.value)
    for old, said in (
        ("D", "p1: D → P in 0.250 s, 0.125 s of it to finish what it had\n"),
        ("P", "p1 serves P\n"),
    ):
        changed = wire.encode(RoleChanged(old, "P", 1, 0.25, 0.125))
        gateway["p1"].scripts["/role"] = lambda _, changed=changed: [(200, {}), changed]
        await asyncio.to_thread(switch, "p1", "P", address)
        assert capsys.readouterr().out == said
