"""The engine's thread: the device's work comes first."""

from __future__ import annotations

from typing import Any

import pytest
from engine_cells import BLOCK_SIZE, Cells, Runner, Step, stream_of_a_cpu

from epd_serve.cache.block_pool import BlockPool
from epd_serve.engine.engine import Engine, EngineEvent, FailureEvent
from epd_serve.engine.step_loop import StepLoop
from epd_serve.engine.telemetry import InstanceTelemetry
from epd_serve.sched.schedule import Budget
from epd_serve.sched.sequence import Sequence
from epd_serve.types import SamplingParams


class Journal:
    """Notes what becomes of steps, in order."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def has(self, mm_hash: str) -> bool:
        return False

    def starved(self, mm_hash: str) -> None:
        self.notes.append(mm_hash)

    def emit(self, events: list[EngineEvent]) -> None:
        self.notes += ["failure" if isinstance(event, FailureEvent) else "token" for event in events]


@pytest.mark.parametrize("fails", [False, True])
def test_tokens_are_handed_out_when_the_device_has_its_work(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    journal: Any = Journal()
    cells, sample = Cells(20), Step.sample

    def noted(step: Step) -> None:
        if fails and journal.notes:
            raise RuntimeError("as it may")
        journal.notes.append("work")
        sample(step)

    monkeypatch.setattr(Step, "sample", noted)
    engine = Engine(
        BlockPool(20, BLOCK_SIZE),
        cells,
        Budget(max_num_tokens=9, max_num_seqs=2),
        journal,
        eos_token_ids=frozenset(),
    )
    runner: Any = Runner(cells, {"r": ()})
    loop = StepLoop(engine, runner, journal, stream_of_a_cpu(), InstanceTelemetry("i"), runs_ahead=True)
    sampling = SamplingParams(seed=0)
    engine.submit(Sequence(request_id="r", prompt_ids=[1, 2, 3], sampling=sampling, max_tokens=3, positions=None))
    while loop.step():
        pass
    assert journal.notes == (
        ["work", "token", "failure"] if fails else ["work", "work", "token", "work", *["token"] * 2]
    )


def test_a_feature_outside_is_starved_when_a_step_has_room_for_its_prompt() -> None:
    journal: Any = Journal()
    budget = Budget(max_num_tokens=9, max_num_seqs=2)
    engine = Engine(BlockPool(20, BLOCK_SIZE), Cells(20), budget, journal, eos_token_ids=frozenset())
    engine.queues.features = journal
    sampling = SamplingParams(seed=0)
    engine.submit(Sequence(request_id="r", prompt_ids=[1] * 12, sampling=sampling, max_tokens=3, positions=None))
    with engine.awaiting("picture"):
        full = engine.plan(None)
        assert full.num_tokens == 9 and not journal.notes
        engine.advance(full, placeholders=False)
        assert engine.plan(full).num_tokens == 3 and journal.notes == ["picture"]
    engine.plan(None)
    assert journal.notes == ["picture"]
