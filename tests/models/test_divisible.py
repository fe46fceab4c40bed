"""Frames of a video could be encoded in several places, parts of an image never."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models
import torch
from torch import Tensor

from device.registry import get_device
from epd_serve.models.family import TowerInputs
from epd_serve.models.tower import Tower

#: Patches of one frame: rows and columns before merging.
ROWS, COLUMNS = 8, 12


def inputs(patches: Tensor, frames: int, rows: int) -> TowerInputs:
    return {"pixel_values": patches, "image_grid_thw": torch.tensor([[frames, rows, COLUMNS]])}


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_frames_of_a_video_are_independent_and_halves_of_an_image_are_not(kind: str, tmp_path: Path) -> None:
    """Qwen's towers attend within a temporal patch, and there, in some layers at least, to all of it."""
    tower = Tower(tiny_models.make_tiny_model(kind, tmp_path / kind), torch.float32, get_device("cpu"))
    torch.manual_seed(1)
    frames = [torch.randn(ROWS * COLUMNS, 3 * 2 * 14 * 14) for _ in range(3)]
    [whole] = tower.encode([inputs(torch.cat(frames), 3, ROWS)])
    parts = [tower.encode([inputs(frame, 1, ROWS)])[0] for frame in frames]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-5, atol=1e-5)
    halves = [tower.encode([inputs(half, 1, ROWS // 2)])[0] for half in frames[0].chunk(2)]
    assert not torch.allclose(torch.cat(halves), parts[0], rtol=1e-2, atol=1e-2)
