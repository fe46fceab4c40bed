"""Whom an engine's events reach."""

from __future__ import annotations

from typing import Any

from epd_serve.engine.hooks import EngineEvent, FailureEvent, Listeners


def test_an_answer_that_cannot_be_written_fails_alone() -> None:
    listeners = Listeners()
    failed: list[FailureEvent] = []
    written: list[EngineEvent] = []

    def feed(event: EngineEvent) -> None:
        if not isinstance(event, FailureEvent):
            raise OverflowError("no such token")
        failed.append(event)

    listeners.listen("broken", feed)
    listeners.listen("fine", written.append)
    events: list[Any] = [type("Event", (), {"request_id": name}) for name in ("broken", "fine")]
    listeners.dispatch(events)
    assert [event.request_id for event in failed] == ["broken"]
    assert written == [events[1]]
