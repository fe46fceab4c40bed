"""The engine on an emulated accelerator, where what is read too early is no number: the tokens of ``generate``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import tiny_models
import torch
from engine_bench import BLOCK_SIZE, EngineBench
from pictures import noise
from PIL import Image
from reference import Reference

from device.base import Event
from device.emulated import EmulatedDevice
from device.registry import get_device
from epd_serve.cost.device_time import DeviceTime
from epd_serve.engine.emulation import Emulation
from epd_serve.engine.step_inputs import StepInputs
from epd_serve.sched.schedule import Budget, ScheduleOutput

DELAY_S = 2e-4


@pytest.fixture
def slow_device() -> Iterator[EmulatedDevice]:
    """Each launch takes a while, so that nothing is ready by chance."""
    device = get_device("emulated:h200:2")  # no thread's device before it says so
    assert isinstance(device, EmulatedDevice)
    device.launch_s = DELAY_S
    yield device
    device.launch_s = 0.0


def requests() -> list[tuple[str, str, list[Image.Image]]]:
    one, two = noise(1), noise(2, (60, 140))
    return [
        ("one image", "What is this?", [one]),
        ("text", "Say apple", []),
        ("two images", "What is in the picture?", [two, one]),
        ("long text", "Repeat: " + "apple banana " * 12, []),
    ]


class TimedBench(EngineBench):
    """Asks at the end of each step how long the device is still at work."""

    def stepped(self, output: ScheduleOutput, seconds: float) -> None:
        start_s = time.perf_counter()
        self.device.synchronize()
        waits_s.append(time.perf_counter() - start_s)
        super().stepped(output, seconds)


waits_s: list[float] = []


def test_a_step_without_tokens_ends_when_the_device_has_computed_it(
    tmp_path: Path, slow_device: EmulatedDevice
) -> None:
    """The middle chunks of a prompt: their times decide on budgets and groups."""
    model = tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model")
    slow_device.launch_s = 2e-3
    waits_s.clear()
    bench = TimedBench(model, Budget(max_num_tokens=16, max_num_seqs=4), device=slow_device)
    try:
        bench.engine.submit(bench.sequence("long", "Repeat: " + "apple " * 60, [], max_tokens=1))
        bench.collect(1)
        assert len(waits_s) > 3
        assert max(waits_s) < 0.05, "each of these has above a hundred launches of 2 ms"
    finally:
        bench.close()


def test_steps_take_the_time_of_the_model_that_is_emulated(tmp_path: Path) -> None:
    model = tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model")
    device = get_device("emulated:h200:2")
    assert isinstance(device, EmulatedDevice)
    time_of = DeviceTime.of("qwen2.5-vl-72b", "rtx-4090")
    emulation = Emulation(device, time_of)
    budget = Budget(max_num_tokens=2048, max_num_seqs=4)
    bench = EngineBench(model, budget, device=device, runs_ahead=True, emulation=emulation)
    began_s = time.perf_counter()
    try:
        bench.engine.submit(bench.sequence("text", "Say apple", [], max_tokens=6))
        (answer,) = bench.collect(1).values()
        seconds = time.perf_counter() - began_s
        assert answer == Reference(model).generate("Say apple", [], max_tokens=6)
        step_s, _ = time_of.step(1, 1, 10, 0)
        assert step_s > 0.17 and seconds > 6 * step_s, "a prefill and five decodes"
    finally:
        bench.close()


def test_the_time_of_a_step_is_spread_over_its_layers(tmp_path: Path) -> None:
    """So that the KV of the first layers is sent while the later ones are computed."""
    model = tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model")
    device = get_device("emulated:h200:2")
    assert isinstance(device, EmulatedDevice)
    time_of = DeviceTime.of("qwen2.5-vl-72b", "rtx-4090")
    step_s, _ = time_of.step(1, 1, 0, 1)
    bench = EngineBench(
        model,
        Budget(max_num_tokens=2048, max_num_seqs=4),
        device=device,
        emulation=Emulation(device, time_of),
    )
    events = [device.event(enable_timing=True)]
    try:
        inputs = StepInputs(
            ids=[5],
            positions=torch.zeros(bench.family.num_position_axes, 1, dtype=torch.long),
            slots=[BLOCK_SIZE],
            rows=[0],
            decode_context_lens=[],
            decode_blocks=[],
            prefill_query_lens=[1],
            prefill_context_lens=[1],
            prefill_blocks=[[1]],
            features=None,
            feature_rows=[],
        )
        device.activate()
        device.synchronize()
        events[0].record()
        bench.executor.compute(inputs, lambda layer: events.append(mark(device)))
        events.append(mark(device))
        device.synchronize()
        parts_ms = [one.elapsed_time(next_one) for one, next_one in pairwise(events)]
        assert len(parts_ms) == bench.memory.layout.num_layers + 1
        assert sum(parts_ms) >= 999 * step_s
        assert min(parts_ms) > 1000 * step_s / len(parts_ms) / 2
    finally:
        bench.close()


def mark(device: EmulatedDevice) -> Event:
    event = device.event(enable_timing=True)
    event.record()
    return event


@pytest.mark.parametrize(
    ("tokens", "runs_ahead"),
    [
        pytest.param(7, True, id="chunks ahead"),
        pytest.param(7, False, id="chunks", marks=pytest.mark.slow),
        pytest.param(2048, True, id="whole prompts ahead", marks=pytest.mark.slow),
        pytest.param(2048, False, id="whole prompts", marks=pytest.mark.slow),
    ],
)
def test_tokens_equal_generate(
    tiny_model: Path, slow_device: EmulatedDevice, tokens: int, runs_ahead: bool
) -> None:
    budget = Budget(max_num_tokens=tokens, max_num_seqs=4)
    bench = EngineBench(tiny_model, budget, device=slow_device, runs_ahead=runs_ahead)
    try:
        for name, text, images in requests():
            if images:
                bench.encode(images)
            bench.engine.submit(bench.sequence(name, text, images, max_tokens=8))
        answers = {name: ids for (name, _), ids in bench.collect(len(requests())).items()}
        reference = Reference(tiny_model)
        for name, text, images in requests():
            assert answers[name] == reference.generate(text, images, max_tokens=8), name
        bench.check_idle()
    finally:
        bench.close()
