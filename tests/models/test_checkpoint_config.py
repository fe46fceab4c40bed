"""A field of a configuration, one of each kind: the answer is transformers', or the model is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from engine_bench import EngineBench
from pictures import noise
from reference import Reference

from device.registry import get_device
from epd_serve.models.checkpoint_config import read_config
from epd_serve.models.language import LanguageModel
from epd_serve.sched.schedule import Budget


def changed(kind: str, path: Path, part: str, name: str, value: Any) -> Path:
    """Save a tiny model whose config.json has another value of a field."""
    file = tiny_models.make_tiny_model(kind, path) / "config.json"
    config = json.loads(file.read_text())
    (config[part] if part else config)[name] = value
    file.write_text(json.dumps(config))
    return path


_LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
_YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 256}
_WINDOWED = {"mrope_section": [4, 6, 6], "rope_type": "default", "rope_theta": 1e3}


@pytest.mark.parametrize(
    ("kind", "part", "name", "value"),
    [
        # honoured: by the fused decoder, the generic one, towers
        ("llava", "text_config", "rope_parameters", _LINEAR),
        ("qwen2_5_vl", "text_config", "rope_parameters", _WINDOWED),
        ("qwen2_5_vl", "vision_config", "fullatt_block_indexes", [0, 2]),
        ("llama", "", "rope_parameters", _YARN),
        ("llama", "", "hidden_act", "gelu_pytorch_tanh"),
        ("qwen3_moe", "", "norm_topk_prob", False),
        ("gemma3", "text_config", "query_pre_attn_scalar", 64),
        ("llava", "vision_config", "hidden_act", "relu"),
        # descriptive
        ("llava", "text_config", "attention_dropout", 0.5),
        # undeclared, and read by nothing that runs
        ("llava", "text_config", "final_logit_softcapping", 1.0),
        ("llava", "vision_config", "vocab_size", 32000),
        ("qwen2_5_vl", "vision_config", "in_chans", 1),
    ],
)
def test_a_field_is_honoured_or_decides_nothing(
    tmp_path: Path, kind: str, part: str, name: str, value: Any
) -> None:
    path = changed(kind, tmp_path / "model", part, name, value)
    images = [] if kind in tiny_models.TEXT_KINDS else [noise(1)]
    bench = EngineBench(path, Budget(max_num_tokens=64, max_num_seqs=2))
    if images:
        bench.encode(images)
    bench.engine.submit(bench.sequence("r", "What is this?", images, max_tokens=8))
    assert bench.collect(1)["r", 0] == Reference(path).generate("What is this?", images, max_tokens=8)
    bench.close()


@pytest.mark.parametrize(
    ("kind", "part", "name", "value"),
    [
        # honoured in some of their values
        ("llama", "", "rope_parameters", {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}),
        ("gemma3_text", "", "rope_parameters", {"rope_type": "longrope", "rope_theta": 1e4}),
        ("qwen2", "", "layer_types", ["linear_attention"] * 5),
        ("llama", "", "num_key_value_heads", 3),
        ("llama", "", "hidden_act", "nonsense"),
        ("qwen2_5_vl", "vision_config", "in_channels", 1),
        ("qwen3_vl", "vision_config", "deepstack_visual_indexes", [1, 1]),
        # declared and not honoured
        ("gemma3", "text_config", "use_bidirectional_attention", True),
        # undeclared, and read by transformers' code
        ("llava", "text_config", "is_causal", False),
        ("llava", "text_config", "attention_chunk_size", 8),
        ("llava", "text_config", "kv_sharing_modes", ["x"] * 5),
        # for weights or layers of another kind
        ("qwen3_vl", "text_config", "per_layer_config", {"0": {"num_key_value_heads": 4}}),
        *(("qwen2_5_vl", part, "quantization_config", {"quant_method": "fp8"}) for part in ("", "text_config")),
    ],
)
def test_a_field_that_is_not_honoured_is_refused_by_name(
    tmp_path: Path, kind: str, part: str, name: str, value: Any
) -> None:
    path = changed(kind, tmp_path / "model", part, name, value)
    with pytest.raises(ValueError, match=name):
        read_config(path)


def test_an_unknown_language_model_is_refused(tmp_path: Path) -> None:
    path = changed("llava", tmp_path / "model", "text_config", "model_type", "gemma")
    with pytest.raises(ValueError, match="does not run the language model 'gemma'"):
        LanguageModel(path, torch.float32, get_device("cpu"))


def test_a_window_bounds_the_context(tmp_path: Path) -> None:
    """Inside its window, sliding attention is full attention."""
    path = changed("mistral", tmp_path / "model", "", "sliding_window", 50)
    assert LanguageModel(path, torch.float32, get_device("cpu")).max_model_len == 50
