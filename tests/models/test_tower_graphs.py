"""Towers captured as graphs on a chip of tests, where what is not computed is no number: the eager features."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
from chip.accelerator import ChipDevice
from pictures import noise

from device.registry import get_device
from epd_serve.models.family import TowerInputs
from epd_serve.models.loader import load_family
from epd_serve.models.tower import Tower

SIZES = (32, 96)
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture
def device() -> Iterator[ChipDevice]:
    device = get_device("chip:0")
    assert isinstance(device, ChipDevice)
    device.activate()
    yield device
    device.synchronize()


def pictures(path: Path, *sizes: tuple[int, int]) -> list[TowerInputs]:
    family = load_family(path)
    return [family.preprocess(np.array(noise(seed, size))) for seed, size in enumerate(sizes)]


def num_patches(batch: list[TowerInputs]) -> int:
    return sum(len(item["pixel_values"]) for item in batch)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", pytest.param("qwen3_5", marks=pytest.mark.slow)])
def test_features_equal_those_without_graphs(kind: str, tmp_path: Path, device: ChipDevice) -> None:
    """Batches that fill a graph in part, one after the other in the same buffers, and one that fits none."""
    path = tiny_models.make_tiny_model(kind, tmp_path / "model")
    plain, captured = (Tower(path, torch.float32, device, graph_sizes=graph_sizes) for graph_sizes in ((), SIZES))
    small, wide, large = pictures(path, (56, 56), (112, 56), (400, 400))
    assert num_patches([large]) > SIZES[-1]
    for batch in ([small], [wide, small, wide], [wide], [small, large]):
        for feature, expected in zip(captured.encode(batch), plain.encode(batch), strict=True):
            torch.testing.assert_close(feature, expected, **CLOSE)
    counts = [num_launches(tower, [wide, small], device) for tower in (plain, captured)]
    assert counts[1] < 15 < 60 < counts[0], "copies of the inputs, the graph, copies of the features"


def num_launches(tower: Tower, batch: list[TowerInputs], device: ChipDevice) -> int:
    before = device.chip.num_launches
    tower.encode(batch)
    return device.chip.num_launches - before


def test_padding_says_nothing(tmp_path: Path, device: ChipDevice) -> None:
    """Whatever an earlier batch has left in the buffers."""
    path = tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model")
    tower = Tower(path, torch.float32, device, graph_sizes=SIZES)
    small, wide = pictures(path, (56, 56), (112, 56))
    fresh = tower.encode([small])[0]
    poisoned = {name: tensor.clone() for name, tensor in wide.items()}
    poisoned["pixel_values"].fill_(float("nan"))
    assert tower.encode([poisoned])[0].isnan().all()
    assert torch.equal(tower.encode([small])[0], fresh)


def test_more_pictures_than_a_graph_has_borders_for_are_encoded_without(
    tmp_path: Path, device: ChipDevice
) -> None:
    path = tiny_models.make_tiny_model("qwen3_vl", tmp_path / "model")
    plain, captured = (Tower(path, torch.float32, device, graph_sizes=sizes) for sizes in ((), (128,)))
    batch = pictures(path, *[(28, 28)] * 7)
    assert num_patches(batch) <= 128
    for feature, expected in zip(captured.encode(batch), plain.encode(batch), strict=True):
        torch.testing.assert_close(feature, expected, **CLOSE)


def test_a_tower_that_looks_at_sizes_itself_is_not_captured(tmp_path: Path, device: ChipDevice) -> None:
    path = tiny_models.make_tiny_model("glm4v", tmp_path / "model")
    plain, other = (Tower(path, torch.float32, device, graph_sizes=sizes) for sizes in ((), SIZES))
    batch = pictures(path, (56, 56))
    assert num_launches(other, batch, device) == num_launches(plain, batch, device)
