"""Sizes of pictures as the processors of transformers make them."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from device.registry import get_device
from epd_serve.cost.shape import KNOWN_SHAPES, shape_from_config, shape_of
from epd_serve.models.language import LanguageModel

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


@pytest.mark.parametrize(
    "kind",
    [
        *("gemma4", "gemma4_moe", "qwen3_vl"),
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in (
                "qwen2_5_vl",
                "llava",
                *tiny_models.STATE_KINDS,
                *tiny_models.TEXT_KINDS,
                *tiny_models.FAMILY_KINDS,
            )
            if kind not in ("gemma4", "gemma4_moe")
        ),
    ],
)
def test_kv_of_a_token_is_what_the_engine_keeps(kind: str, tmp_path: Path) -> None:
    """And the state of a sequence fills as many blocks, but for a block that each layer's pieces may begin."""
    path = tiny_models.make_tiny_model(kind, tmp_path / kind)
    language, shape = LanguageModel(path, torch.float32, get_device("cpu")), shape_of(str(path))
    plane = language.num_kv_heads * language.head_dim
    assert shape.kv_token_bytes == 2 * language.num_layers * plane * 4
    assert shape.language.num_kv_layers == language.num_layers
    block_bytes, states = 16 * shape.kv_token_bytes, shape.language.states
    fewest = -(-shape.state_bytes // block_bytes)
    assert fewest <= language.state_blocks(16) <= fewest + (states.num_layers if states else 0)
