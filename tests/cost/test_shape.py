"""Sizes of pictures as the processors of transformers make them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from device.datasheets import spec_of
from epd_serve.cost.roofline import analytic_profile
from epd_serve.cost.shape import KNOWN_SHAPES, shape_from_config

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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_with_a_recurrent_state_keep_it_in_place_of_kv(dtype: str) -> None:
    """What transformers' cache of a sequence holds, by its length."""
    sizes = {
        "vocab_size": 64,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
    }
    config = AutoConfig.for_model("qwen3_5_text", **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()

    def held(num_tokens: int) -> int:
        cache = DynamicCache(config=config)
        with torch.inference_mode():
            model(input_ids=torch.ones(1, num_tokens, dtype=torch.long), past_key_values=cache)
        layers = [vars(layer) for layer in cache.layers]
        kept = [layer[name] for layer in layers for name in ("keys", "values") if layer.get(name) is not None]
        states = [layer[name] for layer in layers for name in ("conv_states", "recurrent_states") if name in layer]
        kept += [one for of_layer in states for one in of_layer.values() if one is not None]
        return sum(one.nbytes for one in kept)

    shape = shape_from_config({**sizes, "dtype": dtype}, "tiny")
    assert (shape.language.num_layers, shape.language.num_kv_layers) == (8, 2)
    assert shape.kv_token_bytes == held(6) - held(5)
    assert shape.state_bytes == held(5) - 5 * shape.kv_token_bytes
    states = shape.language.states
    assert states is not None
    assert states.parameters == sum(
        weight.numel() for weight in model.model.layers[0].linear_attn.parameters() if weight.ndim == 2
    )


def test_a_state_takes_blocks_of_each_sequence() -> None:
    """Of a model as large as Qwen3.5-27B."""
    config = {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 248320,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    }
    profile = analytic_profile(shape_from_config(config, "large"), spec_of("h200"))
    assert (profile.kv_token_bytes, profile.num_layers) == (1 << 16, 16)
    assert profile.state_bytes == 48 * (4 * 48 * 128**2 + 2 * 4 * (2 * 16 + 48) * 128)
    assert profile.state_blocks(16) == 148
    assert analytic_profile(KNOWN_SHAPES["qwen3-vl-8b"], spec_of("h200")).state_blocks(16) == 0
