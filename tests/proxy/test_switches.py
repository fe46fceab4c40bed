"""Another role for an instance, ordered at the gateway: what may be, and what the table learns of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from epd_serve.protocol.wire import Load, Report
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
