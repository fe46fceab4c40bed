"""Sizes of pictures as the processors of transformers make them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from epd_serve.cost.shape import KNOWN_SHAPES

_SIDE = st.integers(1, 9000)


@pytest.mark.parametrize("name", ["qwen2.5-vl-7b", "qwen3-vl-8b"])
@given(width=_SIDE, height=_SIDE)
def test_pictures_have_the_tokens_of_the_real_processor(name: str, width: int, height: int) -> None:
    vision = KNOWN_SHAPES[name].vision
    assert vision is not None
    side = vision.patch_size * vision.merge
    try:
        rows, columns = smart_resize(
            height, width, factor=side, min_pixels=vision.min_pixels, max_pixels=vision.max_pixels
        )
    except ValueError:
        with pytest.raises(ValueError, match="200 times"):
            vision.num_tokens(width, height)
        return
    assert vision.resized(width, height) == (columns, rows)
    assert vision.num_tokens(width, height) == (rows // side) * (columns // side)


def test_pictures_of_one_size() -> None:
    vision = KNOWN_SHAPES["llava-1.5-7b"].vision
    assert vision is not None
    assert (vision.num_tokens(1920, 1080), vision.resized(1920, 1080)) == (576, (336, 336))
