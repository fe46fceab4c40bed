"""The models that benchmarks run: true shapes and small ones, both with random weights."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.core_model_loading import revert_weight_conversion

from epd_serve.demo import weights_dir

HEAD_DIM = 32
#: The file of a model's directory that is written last.
_COMPLETE = "chat_template.jinja"
_GENERATION = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of a model whose weights are drawn at random.

    Attributes:
        text: fields of the text config.
        vision: fields of Qwen2.5-VL's vision config; None: a Llama, which has no tower.
    """

    text: dict[str, Any]
    vision: dict[str, Any] | None
    tied: bool = False


def _sizes(
    hidden: int, layers: int, heads: int, kv_heads: int, feed_forward: int, vocabulary: int
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": feed_forward,
        "vocab_size": vocabulary,
    }


_WINDOWED = {"window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]}
SHAPES = {
    "Qwen2.5-VL-7B": Shape(
        text=_sizes(3584, 28, 28, 4, 18_944, 152_064),
        vision={"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, **_WINDOWED},
    ),
    "Llama-3-8B": Shape(text=_sizes(4096, 32, 32, 8, 14_336, 128_256), vision=None),
    "tiny-llama": Shape(text=_sizes(128, 2, 4, 2, 256, 1024), vision=None, tied=True),
    "tiny": Shape(
        text=_sizes(128, 3, 4, 2, 256, 1024),
        vision={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "window_size": 112,
            "fullatt_block_indexes": [1],
        },
        tied=True,
    ),
}


def make_shape(name: str, path: Path) -> Path:
    """Save the model of a shape in bfloat16 with the built-in model's tokenizer, unless it is there already.

    The weights repeat 64 MiB of random numbers, so that 16 GB are written as fast as the file system takes them.
    """
    if (path / _COMPLETE).exists():
        return path
    shape = SHAPES[name]
    config, model_class = _config(_text(shape), shape.vision, tied=shape.tied)
    with torch.device("meta"):
        model: Any = model_class(config).to(torch.bfloat16)
    tensors = revert_weight_conversion(model, model.state_dict())
    if shape.tied:
        del tensors["lm_head.weight"]
    path.mkdir(parents=True, exist_ok=True)
    _write_weights(path / "model.safetensors", {key: tuple(one.shape) for key, one in tensors.items()}, config)
    config.dtype = torch.bfloat16
    config.architectures = [model_class.__name__]
    config.save_pretrained(path)
    _GENERATION.save_pretrained(path)
    processor = json.loads((weights_dir() / "preprocessor_config.json").read_text())
    processor |= {"patch_size": 14, "size": {"shortest_edge": 3136, "longest_edge": 4_000_000}}
    _add_files(path, None if shape.vision is None else processor)
    return path


def _text(shape: Shape) -> dict[str, Any]:
    return shape.text | {"max_position_embeddings": 32_768}


def language_model(name: str, device: str) -> Any:
    """Return transformers' model of a shape's text part on a device, in bfloat16 with random weights."""
    shape = SHAPES[name]
    ends = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0}
    config_class: Any = LlamaConfig if shape.vision is None else Qwen2Config
    model_class: Any = LlamaForCausalLM if shape.vision is None else Qwen2ForCausalLM
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return model_class(config_class(**_text(shape), tie_word_embeddings=shape.tied, **ends)).eval()
    finally:
        torch.set_default_dtype(default)


def _write_weights(file: Path, shapes: Mapping[str, tuple[int, ...]], config: Any) -> None:
    """Write a safetensors file: norms' weights are 1, all other numbers random.

    Tokens without a text of their own have rows of zeros: others are likelier, so that a client sees each one.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    torch.manual_seed(0)
    numbers = torch.empty(1 << 25, dtype=torch.bfloat16).normal_(std=0.02).view(torch.uint8).numpy()
    ones = torch.ones(1 << 20, dtype=torch.bfloat16).view(torch.uint8).numpy()
    tokenizer = AutoTokenizer.from_pretrained(weights_dir())
    first, end = max(tokenizer.added_tokens_decoder) + 1, len(tokenizer)
    with file.open("wb") as output:
        output.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shapes.items():
            row_bytes, left = 2 * math.prod(shape[1:]), 2 * math.prod(shape)
            if len(shape) == 2 and shape[0] == config.get_text_config().vocab_size:
                output.seek(first * row_bytes, os.SEEK_CUR)
                output.write(numbers[: (end - first) * row_bytes])
                output.seek(left - end * row_bytes, os.SEEK_CUR)
                continue
            source = ones if "norm" in name and name.endswith("weight") else numbers
            while left:
                left -= output.write(source[: min(left, len(source))])
        output.truncate()


def _add_files(path: Path, processor: dict[str, Any] | None) -> None:
    if processor is not None:
        (path / "preprocessor_config.json").write_text(json.dumps(processor))
    for file in ("tokenizer.json", "tokenizer_config.json", _COMPLETE):
        shutil.copy(weights_dir() / file, path / file)


def make_model(
    path: Path,
    *,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    max_length: int = 4096,
    max_pixels: int = 1 << 24,
) -> Path:
    """Save a Qwen3-VL model, small enough for a CPU: its heads may be narrow, its tower has one small layer."""
    words = len(AutoTokenizer.from_pretrained(weights_dir()))
    text = _sizes(hidden, layers, heads, kv_heads, intermediate, words)
    text |= {"head_dim": HEAD_DIM, "max_position_embeddings": max_length}
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 14,
        "deepstack_visual_indexes": [],
    }
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": 56 * 56,
        "max_pixels": max_pixels,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
    }
    config, model_class = _config(text, vision, tied=True, narrow=True)
    torch.manual_seed(0)
    model: Any = model_class(config)
    model.generation_config = _GENERATION
    model.save_pretrained(path)
    _add_files(path, processor)
    return path


def _config(
    text: dict[str, Any], vision: dict[str, Any] | None, *, tied: bool, narrow: bool = False
) -> tuple[Any, Any]:
    """The config of a model, and its class; ``narrow``: a Qwen3-VL, whose heads need not share its hidden size."""
    ends = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0}
    if vision is None:
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 5e5}
        return LlamaConfig(**text, rope_parameters=rope, tie_word_embeddings=tied, **ends), LlamaForCausalLM
    tokens = AutoTokenizer.from_pretrained(weights_dir()).convert_tokens_to_ids(
        ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"]
    )
    names = ("image_token_id", "vision_start_token_id", "vision_end_token_id", "video_token_id")
    head_dim = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    section = [head_dim // 8, head_dim * 3 // 16, head_dim * 3 // 16]
    rope = {"rope_type": "default", "mrope_section": section, "rope_theta": 1e6}
    classes: tuple[Any, Any] = (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration)
    config_class, model_class = (Qwen3VLConfig, Qwen3VLForConditionalGeneration) if narrow else classes
    config = config_class(
        text_config=text | {"rope_parameters": rope, **ends},
        vision_config=vision | {"out_hidden_size": text["hidden_size"]},
        tie_word_embeddings=tied,
        **dict(zip(names, tokens, strict=True)),
    )
    return config, model_class
