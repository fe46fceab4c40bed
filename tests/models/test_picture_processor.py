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
    expected = theirs(images=[Image.fromarray(pixels)], return_tensors="pt")
    made, values = family.preprocess(pixels), expected["pixel_values"]
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


@pytest.mark.parametrize("kind", KINDS)
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
        ("resample", 2),
        ("do_pan_and_scan", True),
        ("tile_size", 57),
    ],
)
def test_a_file_that_is_not_honoured_is_refused(kind: str, name: str, value: Any, tmp_path: Path) -> None:
    path = tiny_models.make_tiny_model(kind, tmp_path / "model")
    file = path / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))
    with pytest.raises(ValueError, match=name):
        load_family(path)
