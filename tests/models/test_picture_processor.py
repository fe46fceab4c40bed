"""Pictures of families that transformers prepares with torchvision alone: pixels and layouts equal to the bit."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from numpy.typing import NDArray
from PIL import Image
from plain_torchvision import image_processor_of, run_beside_torchvision

from epd_serve.errors import InvalidRequest
from epd_serve.models.family import Family, Size
from epd_serve.models.loader import load_family

TORCHVISION = os.environ.get("EPD_SERVE_TORCHVISION")
NUM_PICTURES = 8
#: With what differs from the tiny model's file.
KINDS: dict[str, list[dict[str, Any]]] = {
    "gemma4_unified": [{}, {"max_soft_tokens": 140, "rescale_factor": 0.01}],
    "llama4": [
        {},
        {"max_patches": 5, "resize_to_max_canvas": True},
        {"max_patches": 16, "image_mean": [0.1, 0.2, 0.3]},
    ],
    "lfm2_vl": [{}, {"max_tiles": 10, "use_thumbnail": False}, {"do_image_splitting": False}],
}


def drawn(seed: int) -> tuple[Size, NDArray[np.uint8]]:
    pick = random.Random(seed)
    width, height = (round(8 * 50 ** pick.random()) for _ in range(2))
    return (width, height), np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def compare(family: Family, theirs: Any, seed: int) -> bool:
    """Hold a drawn picture against transformers' own class; False for one that the family does not take."""
    size, pixels = drawn(seed)
    try:
        family.parts(size)
    except InvalidRequest:
        return False
    more = {"return_row_col_info": True} if family.title == "LFM2-VL" else {}
    expected = theirs(images=[Image.fromarray(pixels)], return_tensors="pt", **more)
    made, values = family.preprocess(pixels), expected["pixel_values"]
    if more:
        assert torch.equal(made["spatial_shapes"], expected["spatial_shapes"]), size
        values = values[expected["pixel_attention_mask"].bool()]
    if "image_position_ids" in made:  # and theirs are padded
        is_patch = (expected["image_position_ids"] >= 0).all(-1)
        assert torch.equal(made["image_position_ids"][0], expected["image_position_ids"][is_patch]), size
        values = values[is_patch][None]
    assert made["pixel_values"].dtype == values.dtype
    assert torch.equal(made["pixel_values"], values), size
    return True


def checkpoints(kind: str, path: Path) -> list[Path]:
    """Models of a kind, one for each of its files."""
    paths = []
    for number, changed in enumerate(KINDS[kind]):
        paths.append(tiny_models.make_tiny_model(kind, path / f"{kind}{number}"))
        file = paths[-1] / "preprocessor_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    return paths


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] if kind != "lfm2_vl" else []) for kind in KINDS]
)
def test_pixels_of_pictures_equal_the_processor_s(kind: str, tmp_path: Path) -> None:
    """And those of torchvision itself, where there is one: in a process of its own, as transformers then reads
    pictures of other families in another way."""
    paths = checkpoints(kind, tmp_path)
    for path in paths:
        family, theirs = load_family(path), image_processor_of(path, kind)
        assert sum(compare(family, theirs, seed) for seed in range(NUM_PICTURES)) > NUM_PICTURES // 2
    if TORCHVISION is None:
        return
    run_beside_torchvision(
        TORCHVISION,
        "import test_picture_processor\n"
        f"test_picture_processor.compare_with_torchvision({[str(path) for path in paths]!r})\n",
    )


def compare_with_torchvision(paths: list[str]) -> None:
    from transformers import AutoImageProcessor

    for path in map(Path, paths):
        theirs = AutoImageProcessor.from_pretrained(path)
        assert theirs.backend == "torchvision"
        family = load_family(path)
        assert sum(compare(family, theirs, seed) for seed in range(NUM_PICTURES)) > NUM_PICTURES // 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("do_resize", False),
        ("resample", 3),
        ("do_pan_and_scan", True),
        ("tile_size", 57),
        ("size", {"height": 70}),
    ],
)
def test_a_file_that_is_not_honoured_is_refused(kind: str, name: str, value: Any, tmp_path: Path) -> None:
    if (kind, name) in (("lfm2_vl", "size"), ("gemma4_unified", "size"), ("llama4", "tile_size")):
        name, value = "max_tiles", 11
    if (kind, name) == ("gemma4_unified", "resample"):
        value = 2
    path = tiny_models.make_tiny_model(kind, tmp_path / "model")
    file = path / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))
    with pytest.raises(ValueError, match=name):
        load_family(path)


def test_a_picture_so_narrow_that_transformers_pads_it_wrongly_is_refused(tmp_path: Path) -> None:
    family = load_family(tiny_models.make_tiny_model("lfm2_vl", tmp_path / "model"))
    with pytest.raises(InvalidRequest, match="an image of 8x900 pixels cannot be used: it is so narrow"):
        family.parts((8, 900))
