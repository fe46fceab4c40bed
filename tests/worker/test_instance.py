"""What all requests of an instance share must survive the failure of one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from epd_serve.config import InstanceOptions
from epd_serve.types import Role
from epd_serve.worker import instance as module
from epd_serve.worker.events import EngineEvent, FailureEvent
from epd_serve.worker.instance import Instance


@pytest.fixture
def instance() -> Instance:
    return Instance(InstanceOptions(name="d0", role=Role.parse("D"), model="m", served_model_name="m", port=1))


def test_an_answer_that_cannot_be_written_fails_alone(instance: Instance) -> None:
    failed: list[FailureEvent] = []
    written: list[EngineEvent] = []

    def feed(event: EngineEvent) -> None:
        if not isinstance(event, FailureEvent):
            raise OverflowError("no such token")
        failed.append(event)

    instance._listen("broken", feed)
    instance._listen("fine", written.append)
    events: list[Any] = [type("Event", (), {"request_id": name}) for name in ("broken", "fine")]
    instance._dispatch(events)
    assert [event.request_id for event in failed] == ["broken"]
    assert written == [events[1]]


async def test_housekeeping_goes_on(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HOUSEKEEPING_S", 0.01)
    calls: list[int] = []

    class Failing:
        def expire(self) -> None:
            calls.append(1)
            raise AssertionError("a reservation in an unknown state")

    instance._decode = instance._inbox = Failing()  # type: ignore[assignment]
    housekeeping = asyncio.create_task(instance._housekeep())
    await asyncio.sleep(0.2)
    assert len(calls) > 2
    housekeeping.cancel()
    await asyncio.gather(housekeeping, return_exceptions=True)
