"""Whom an engine's events reach."""

from __future__ import annotations

from epd_serve.engine.computing import SampledToken
from epd_serve.engine.engine import EngineEvent, FailureEvent, Listeners, TokenEvent
from epd_serve.sched.sequence import Sequence
from epd_serve.types import SamplingParams


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
    sampling = SamplingParams(seed=0)
    sequences = [
        Sequence(request_id=name, prompt_ids=[1], sampling=sampling, max_tokens=1, positions=None)
        for name in ("broken", "fine")
    ]
    events: list[EngineEvent] = [TokenEvent(sequence, SampledToken(2), None) for sequence in sequences]
    listeners.dispatch(events)
    assert [event.request_id for event in failed] == ["broken"]
    assert written == [events[1]]
