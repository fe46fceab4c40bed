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
