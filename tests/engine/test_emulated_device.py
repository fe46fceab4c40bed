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
from reference import Reference, reference_of

from device.base import Event
from device.emulated.accelerator import EmulatedDevice
from device.emulated.timeline import EMULATED_FAULTS, Faults
from device.registry import get_device
from epd_serve.cost.device_time import DeviceTime
from epd_serve.cost.shape import shape_of
from epd_serve.engine.emulated.emulation import Emulation
from epd_serve.engine.step_inputs import StepInputs, TableChange
from epd_serve.models.loader import load_family
from epd_serve.models.tower import Tower
from epd_serve.sched.schedule import Budget, ScheduleOutput
from epd_serve.transfer.embedded import EmbeddedTransport

DELAY_S = 2e-4


@pytest.fixture
def slow_device() -> Iterator[EmulatedDevice]:
    """Each launch takes a while, so that nothing is ready by chance."""
    device = get_device("emulated:h200:2")  # no thread's device before it says so
    assert isinstance(device, EmulatedDevice)
    device.chip.launch_s = DELAY_S
    yield device
    device.chip.launch_s = 0.0


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
    slow_device.chip.launch_s = 2e-3
    waits_s.clear()
    bench = TimedBench(model, Budget(max_num_tokens=16, max_num_seqs=4), device=slow_device)
    try:
        bench.engine.submit(bench.sequence("long", "Repeat: " + "apple " * 60, [], max_tokens=1))
        bench.collect(1)
        assert len(waits_s) > 3
        assert max(waits_s) < 0.15, "each of these has above a hundred launches of 2 ms"
    finally:
        bench.close()


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    """All devices are so many times as slow: parts of a step are longer than this machine's hiccups."""
    faults = tmp_path / "faults.json"
    faults.write_text('{"*": {"slowness": 5.0}}')
    device = get_device("emulated:h200:2")
    assert isinstance(device, EmulatedDevice)
    monkeypatch.setattr(device.timeline, "faults", Faults(faults))
    yield 5.0


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


def test_the_time_of_an_encode_is_spread_over_the_layers_of_the_tower(tmp_path: Path, slow: float) -> None:
    """So that it can pause between them for decodes."""
    model = tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model")
    device = get_device("emulated:h200:2")
    assert isinstance(device, EmulatedDevice)
    time_of = DeviceTime.of("qwen2.5-vl-7b", "rtx-4090")
    pixels = [2000 * 2000]
    encode_s, _ = time_of.encode(pixels)
    emulation, events = Emulation(device, time_of), [device.event(enable_timing=True)]
    device.activate()
    tower = Tower(model, torch.float32, device, emulation.between_layers(lambda: events.append(mark(device))))
    emulation.num_tower_layers = tower.num_layers
    inputs = load_family(model).preprocess(noise(1))
    events[0].record()
    with emulation.encode(pixels):
        tower.encode([inputs])
    end = mark(device)
    device.synchronize()
    assert len(events) == 1 + tower.num_layers
    assert events[0].elapsed_time(end) > 950 * slow * encode_s
    for one, next_one in pairwise(events):
        assert one.elapsed_time(next_one) > 1000 * slow * encode_s / (tower.num_layers + 1) / 3


def test_transfers_take_the_time_of_the_model_that_is_emulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = tmp_path / "faults.json"
    faults.write_text('{"links": {"slowness": 4.0}}')
    monkeypatch.setenv(EMULATED_FAULTS, str(faults))
    model = tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model")
    device = get_device("emulated:h200:2")
    assert isinstance(device, EmulatedDevice)
    time_of = DeviceTime.of("qwen2.5-vl-7b", "ascend-910b3")
    link = Emulation(device, time_of).linked(EmbeddedTransport(path="shm"), model, value_bytes=4)
    try:
        tiny = shape_of(str(model))
        for name, token_bytes, larger in (
            ("kv", 4 * tiny.language.kv_values, time_of.profile.kv_token_bytes),
            ("features", 4 * tiny.language.hidden, time_of.profile.feature_token_bytes),
        ):
            slab = link.allocate(name, 50 * token_bytes)
            began_s = time.perf_counter()
            link.write(slab.region, [(0, memoryview(bytes(50 * token_bytes)))])
            assert time.perf_counter() - began_s >= 4 * 50 * larger / 28e9
    finally:
        link.close()


def test_the_time_of_a_step_is_spread_over_its_layers(tmp_path: Path, slow: float) -> None:
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
            decodes=TableChange(),
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
        assert sum(parts_ms) > 950 * slow * step_s, "events are noted a little late"
        assert min(parts_ms) > 1000 * slow * step_s / len(parts_ms) / 3
    finally:
        bench.close()


def mark(device: EmulatedDevice) -> Event:
    event = device.event(enable_timing=True)
    event.record()
    return event


@pytest.mark.parametrize(("tokens", "runs_ahead"), [(7, True), pytest.param(2048, False, marks=pytest.mark.slow)])
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
        reference = reference_of(tiny_model)
        for name, text, images in requests():
            assert answers[name] == reference.generate(text, images, max_tokens=8), name
        bench.check_idle()
    finally:
        bench.close()
