"""Models with random weights for the transfer benchmarks: the real architecture, small enough for a CPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from epd_serve.demo import weights_dir

PATCH, MERGE = 14, 2
HEAD_DIM = 32


def make_model(
    path: Path,
    *,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    vision_layers: int = 1,
    vision_hidden: int = 32,
    max_length: int = 4096,
    max_pixels: int = 1 << 24,
) -> Path:
    """A Qwen2.5-VL model in ``path``. Its tower attends within windows, so that large images stay affordable."""
    tokenizer = AutoTokenizer.from_pretrained(weights_dir())
    image, start, end, video = tokenizer.convert_tokens_to_ids(
        ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"]
    )
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": max_length,
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e6},
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    vision = {
        "depth": vision_layers,
        "hidden_size": vision_hidden,
        "intermediate_size": 2 * vision_hidden,
        "num_heads": max(2, vision_hidden // 64),
        "out_hidden_size": hidden,
        "window_size": 112,
        "fullatt_block_indexes": [],
    }
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=True,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    model: Any = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(weights_dir() / name, path / name)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": 56 * 56,
        "max_pixels": max_pixels,
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
    }
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    return path
