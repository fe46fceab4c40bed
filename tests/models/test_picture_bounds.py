"""``min_pixels`` and ``max_pixels`` of a request: what transformers makes of a picture with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from pictures import noise
from processors import processor_of

from epd_serve.errors import InvalidRequest
from epd_serve.models.loader import load_family
from epd_serve.protocol.wire import MediaRef

#: The names of today's transformers.
EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
BOUNDS = ({"max_pixels": 56 * 56}, {"min_pixels": 90 * 90}, {"min_pixels": 30, "max_pixels": 80 * 80})


def ref(size: tuple[int, int], asked: dict[str, Any]) -> MediaRef:
    return MediaRef("", *size, processing=json.dumps(asked))


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_pictures_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    path = tiny_models.make_tiny_model(kind, tmp_path / kind)
    family, processor = load_family(path), processor_of(path).image_processor
    grids = set()
    for size in ((150, 100), (50, 40), (500, 15)):
        picture = noise(1, size)
        for asked in BOUNDS:
            item = ref(size, asked)
            size_asked = {**dict(processor.size), **{EDGES[name]: pixels for name, pixels in asked.items()}}
            theirs = processor(images=[picture], return_tensors="pt", size=size_asked)
            ours = family.of(item).preprocess(np.array(picture))
            assert torch.equal(ours["pixel_values"], theirs["pixel_values"])
            (grid,) = theirs["image_grid_thw"].tolist()
            assert sum(part for part in family.parts_of(item)) == grid[1] * grid[2] // processor.merge_size**2
            grids.add((size, tuple(grid)))
    assert len(grids) > 5, "the bounds make a difference"
    with pytest.raises(InvalidRequest, match=r"at most \d+ pixels, not 999999"):
        family.parts_of(ref((50, 40), {"min_pixels": 999_999}))


def test_other_families_refuse_them_by_name(tmp_path: Path) -> None:
    family = load_family(tiny_models.make_tiny_model("internvl", tmp_path / "internvl"))
    with pytest.raises(InvalidRequest, match="fixes the sizes of its pictures; leave out max_pixels") as refusal:
        family.parts_of(ref((50, 40), {"max_pixels": 4}))
    assert refusal.value.param == "mm_processor_kwargs"
