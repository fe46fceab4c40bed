"""The engine on an emulated accelerator, where what is read too early is no number: the tokens of ``generate``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_bench import EngineBench
from pictures import noise
from PIL import Image
from reference import Reference

from device.emulated import EmulatedDevice
from device.registry import get_device
from epd_serve.sched.language import Budget

DELAY_S = 2e-4


@pytest.fixture
def slow_device() -> Iterator[EmulatedDevice]:
    """Each launch takes a while, so that nothing is ready by chance."""
    device = get_device("emulated:h200:0")
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
