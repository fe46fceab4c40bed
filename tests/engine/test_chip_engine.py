"""The engine on a chip of tests, where what is read too early is no number: the tokens of ``generate``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest
import tiny_models
from chip.accelerator import ChipDevice
from engine_bench import EngineBench
from pictures import QUESTIONS
from reference import Reference

from device.registry import get_device
from epd_serve.sched.schedule import Budget, ScheduleOutput

DELAY_S = 2e-4


@pytest.fixture
def slow_device() -> Iterator[ChipDevice]:
    """Each launch takes a while, so that nothing is ready by chance."""
    device = get_device("chip:2")  # no thread's device before it says so
    assert isinstance(device, ChipDevice)
    device.chip.launch_s = DELAY_S
    device.chip.num_replays.clear()
    yield device
    device.chip.launch_s = 0.0


class TimedBench(EngineBench):
    """Asks at the end of each step how long the device is still at work."""

    def add_step(self, output: ScheduleOutput, seconds: float) -> None:
        start_s = time.perf_counter()
        self.device.synchronize()
        waits_s.append(time.perf_counter() - start_s)
        super().add_step(output, seconds)


waits_s: list[float] = []


def test_a_step_without_tokens_ends_when_the_device_has_done_it(tmp_path: Path, slow_device: ChipDevice) -> None:
    """The middle chunks of a prompt: their times decide on budgets and groups."""
    model = tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model")
    slow_device.chip.launch_s = 2e-3
    waits_s.clear()
    bench = TimedBench(model, Budget(max_num_tokens=16, max_num_seqs=4), device=slow_device)
    try:
        bench.engine.submit(bench.sequence("long", "Repeat: " + "apple " * 60, [], max_tokens=1))
        bench.collect(1)
        assert len(waits_s) > 3
        assert median(waits_s) < 0.05, "each of these has above a hundred launches of 2 ms"
    finally:
        bench.close()


@pytest.mark.parametrize(
    "tiny_model",
    ["qwen3_vl", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen2_5_vl", "llava"))],
    indirect=True,
)
@pytest.mark.parametrize(
    ("tokens", "runs_ahead"),
    [
        pytest.param(7, True, id="chunks ahead"),
        pytest.param(7, False, id="chunks", marks=pytest.mark.slow),
        pytest.param(2048, True, id="whole prompts ahead", marks=pytest.mark.slow),
        pytest.param(2048, False, id="whole prompts", marks=pytest.mark.slow),
    ],
)
def test_tokens_equal_generate(tiny_model: Path, slow_device: ChipDevice, tokens: int, runs_ahead: bool) -> None:
    budget = Budget(max_num_tokens=tokens, max_num_seqs=4)
    bench = EngineBench(tiny_model, budget, device=slow_device, runs_ahead=runs_ahead)
    try:
        for number, (text, images) in enumerate(QUESTIONS[:5]):
            if images:
                bench.encode(images)
            bench.engine.submit(bench.sequence(f"{number}", text, images, max_tokens=40 - 8 * number))
        answers = bench.collect(5)
        reference = Reference(tiny_model)
        for number, (text, images) in enumerate(QUESTIONS[:5]):
            assert answers[f"{number}", 0] == reference.generate(text, images, max_tokens=40 - 8 * number)
        assert {1, 4} <= {*slow_device.chip.num_replays}, "decodes of one row and of several are replayed"
        bench.check_idle()
    finally:
        bench.close()
