"""Every field of every family's configuration: the answer is transformers', or the model is refused by name."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import odd_models
import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig

from epd_serve.models.checkpoint_config import read_config

_YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 1e4,
}
_ROPES = [
    {"rope_type": "default", "rope_theta": 1e2},
    {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    {
        "rope_type": "longrope",
        "factor": 4.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "rope_theta": 1e4,
    },
    {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
    {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e3, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
    },
    _YARN,
    _LLAMA3,
]
_ACTIVATIONS = ["gelu", "relu2", "gelu_pytorch_tanh", "silu", "xielu", "nonsense"]
#: Other values of a field, where its type does not tell.
_OTHERS: dict[str, list[Any]] = {
    "hidden_act": _ACTIVATIONS,
    "hidden_activation": _ACTIVATIONS,
    "projector_hidden_act": ["relu", "silu", "nonsense"],
    "rope_parameters": _ROPES,
    "vision_config.rope_parameters": [
        {"rope_type": "axial", "rope_theta": 10.0},
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    ],
    "hidden_size": [96],
    "vision_config.hidden_size": [64],
    "embed_dim": [64],
    "intermediate_size": [80],
    "num_attention_heads": [2, 8],
    "vision_config.num_attention_heads": [4],
    "num_heads": [4],
    "num_key_value_heads": [1, 3, 4, None],
    "head_dim": [8, 32, None],
    "vocab_size": [160],
    "max_position_embeddings": [640, 64, 48, 24],
    "layer_types": [
        ["full_attention", "sliding_attention"],
        ["linear_attention"] * 2,
        ["full_attention"] * 2,
        ["full_attention", "linear_attention"],
        ["full_attention"] * 4,
    ],
    "sliding_window": [40, None],
    "max_window_layers": [1],
    "mlp_only_layers": [[], [0]],
    "decoder_sparse_step": [2],
    "num_experts": [6],
    "top_k_experts": [1],
    "use_bidirectional_attention": [False, True, "vision", None],
    "moe_intermediate_size": [48],
    "linear_num_key_heads": [1, 4],
    "linear_num_value_heads": [2, 8],
    "dtype": ["bfloat16", "float16"],
    "architectures": [["SomethingElse"]],
    "transformers_version": ["4.0.0"],
    "id2label": [{"0": "a", "1": "b", "2": "c"}],
    "label2id": [{"a": 0}],
    "problem_type": ["regression"],
    "chunk_size_feed_forward": [8],
    "bos_token_id": [3],
    "eos_token_id": [3],
    "pad_token_id": [3],
    "in_channels": [1, 4],
    "num_channels": [1, 4],
    "patch_size": [7],
    "spatial_merge_size": [1, 4],
    "temporal_patch_size": [1],
    "window_size": [28, 112],
    "fullatt_block_indexes": [[], [0, 1]],
    "deepstack_visual_indexes": [[1], [1, 0], [0, 5], [1, 1], []],
    "num_position_embeddings": [16, 100],
    "out_hidden_size": [96],
    "image_size": [42, 56],
    "mm_tokens_per_image": [1],
    "final_logit_softcapping": [2.0],
    "image_grid_pinpoints": [[[28, 56], [56, 28]]],
    "vision_aspect_ratio": ["anyres_max_1", "anyres_max_9"],
    "downsample_ratio": [1.0, 0.25],
    "norm_type": ["rms_norm"],
    "video_token_index": [9],
    "vision_feature_select_strategy": ["full", "default"],
    "vision_feature_layer": [-1, 0, [-1, 1]],
    "image_token_id": [9],
    "image_token_index": [9],
    "audio_token_id": [9],
    "audio_token_index": [9],
    "audio_start_token_id": [13],
    "audio_end_token_id": [13],
    "encoder_attention_heads": [4],
    "d_model": [64],
    "activation_function": _ACTIVATIONS,
    "max_source_positions": [200],
    "conv_chunksize": [1],
    "subsampling_conv_channels": [[32, 8], [16, 4]],
    "n_window": [25],
    "n_window_infer": [200],
}
#: Without these a field would say nothing.
_WITH: dict[str, dict[str, Any]] = {
    "vocab_size": {"vocab_size_per_layer_input": 160},
    "use_sliding_window": {"sliding_window": 40, "max_window_layers": 1},
    "max_window_layers": {"sliding_window": 40, "use_sliding_window": True},
    "layer_types": {"sliding_window": 40, "use_sliding_window": True},
    "topk_group": {"n_group": 2},
    "mm_embed_dim": {"output_proj_dims": 33},
    "output_proj_dims": {"mm_embed_dim": 33},
    "enable_moe_block": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "use_double_wide_mlp": {"num_kv_shared_layers": 1},
    "num_hidden_layers": {"layer_types": None},
}
#: Fields of which transformers runs one value alone, or one that follows from others.
_FIXED = {
    "return_dict",
    "is_encoder_decoder",
    "text_config.return_dict",
    "vision_config.return_dict",
    "audio_config.return_dict",
    "vision_config.in_channels",
    "vision_config.num_channels",
    "vision_config.out_hidden_size",
    "vision_config.hidden_size",
    "audio_config.output_dim",
}
#: And of pictures that are tiles or rows.
_FIXED_OF_TILES = {"vision_feature_layer", "vision_feature_select_strategy"}
#: And of Qwen3's towers that hear: 13 rows are of 100 frames.
_FIXED_OF_EARS = {"audio_config.n_window"}

_PARTS = ("text_config", "vision_config", "audio_config")
_QWEN3_EARS = ("qwen3_omni", "qwen3_asr")
#: Of every configuration class.
_COMMON = {field.name for field in dataclasses.fields(PreTrainedConfig)}


def _others(part: str, field: dataclasses.Field[Any], value: Any) -> list[Any]:
    """Other values that a field may have."""
    listed = _OTHERS.get(f"{part}.{field.name}", _OTHERS.get(field.name))
    if listed is not None:
        return [other for other in listed if other != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, float):
        return [value * 1e4 if value and value < 1e-3 else value + 0.5]
    raise AssertionError(f"{part}.{field.name}: the test has no other value than {value!r}")


def _changes(family: str) -> Iterator[tuple[str, list[list[odd_models.Change]]]]:
    """All fields of a family's configuration classes, each with the changes to be tried."""
    _, text_type, tower_type = odd_models.FAMILIES[family]
    config: Any = AutoConfig.for_model(**odd_models.config_of(family))
    parts = [part for part in _PARTS if getattr(config, part, None) is not None]
    for part, owner in [("", config), *((part, getattr(config, part)) for part in parts)]:
        if family.startswith("llava"):  # what another family here has as well is tried once
            is_new = {"": text_type == "llama", "text_config": tower_type == "clip_vision_model"}
            if not is_new.get(part, text_type == "llama"):
                continue
        if family in (*odd_models.TILED, *odd_models.SOUNDS) and part == "text_config":
            continue
        for field in dataclasses.fields(owner):
            if field.name not in _PARTS:
                own = vars(
                    owner
                )  # without what some classes find by layer; others keep a field under another name
                value = own[field.name] if field.name in own else getattr(owner, field.name)
                others = _others(part, field, value)
                along = [(part, name, v) for name, v in _WITH.get(field.name, {}).items() if hasattr(owner, name)]
                yield f"{part}.{field.name}".lstrip("."), [[(part, field.name, other), *along] for other in others]


def _outcome(path: Path, config: dict[str, Any], name: str) -> tuple[str, str]:
    """("equal", "refused", "cannot build" or "wrong", why)."""
    try:
        reference = odd_models.generate(path, config)
    except odd_models.CannotBuild as error:
        return "cannot build", str(error)
    try:
        logits = odd_models.answer(path, reference)
    except ValueError as error:
        return ("refused" if name in str(error) else "wrong"), str(error)
    except Exception as error:  # noqa: BLE001 - a third thing, whatever it is
        return "wrong", repr(error)
    equal = logits.argmax(-1).tolist() == reference.tokens and torch.allclose(
        logits, reference.logits, rtol=1e-3, atol=1e-3
    )
    return ("equal", "") if equal else ("wrong", f"{float((logits - reference.logits).abs().max()):.3g} off")


def _check_fields(path: Path, family: str, capsys: pytest.CaptureFixture[str], *, all_values: bool) -> None:
    counts, wrong, not_tried = Counter[str](), list[str](), list[str]()
    for field, changes in _changes(family):
        kinds, name = set[str](), field.rpartition(".")[2]
        if name in _COMMON and not all_values:
            continue
        for change in changes:
            outcome, why = _outcome(path, odd_models.config_of(family, *change), name)
            if outcome == "wrong":
                wrong.append(f"{field} = {change[0][2]!r}: {why}")
            if outcome != "cannot build":
                kinds.add(outcome)
                if not all_values:
                    break
        if kinds:
            counts["refused" if kinds == {"refused"} else "equal" if kinds == {"equal"} else "by value"] += 1
        else:
            not_tried.append(field)
    with capsys.disabled():
        print(
            f"\n{family}: {counts.total()} fields tried, {dict(counts)}; transformers runs no other: {not_tried}"
        )
    assert wrong == [], "\n".join(wrong)
    is_tiled = family in odd_models.TILED
    fixed = _FIXED | (_FIXED_OF_TILES if is_tiled else _FIXED_OF_EARS if family in _QWEN3_EARS else set())
    assert set(not_tried) <= fixed
    has_text = family not in (*odd_models.TILED, *odd_models.SOUNDS)
    assert counts["equal"] + counts["by value"] > (15 if has_text else 9)


@pytest.mark.parametrize("family", ["llama"])
def test_a_field_is_honoured_or_refused(tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]) -> None:
    _check_fields(tmp_path, family, capsys, all_values=False)


@pytest.mark.slow
@pytest.mark.parametrize("family", odd_models.FAMILIES)
def test_every_value_is_honoured_or_refused(
    tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _check_fields(tmp_path, family, capsys, all_values=True)


@pytest.mark.parametrize(
    ("family", "part", "name", "value", "expected"),
    [
        # read by transformers' code, though no class declares it
        ("llava-llama-clip", "text_config", "is_causal", False, "refused"),
        ("llava-llama-clip", "text_config", "attention_chunk_size", 8, "refused"),
        ("llava-llama-clip", "text_config", "kv_sharing_modes", ["x"] * 2, "refused"),
        ("llava-llama-clip", "text_config", "sliding_window", 40, "equal"),
        ("llava-qwen2-clip", "text_config", "head_dim", 32, "equal"),
        ("qwen2_5_vl", "text_config", "head_dim", 16, "equal"),
        ("qwen3_vl", "text_config", "layer_types", ["full_attention"] * 2, "equal"),
        # read by nothing that runs
        ("llava-llama-clip", "text_config", "final_logit_softcapping", 1.0, "equal"),
        ("llava-llama-clip", "text_config", "logits_soft_cap", 1.0, "equal"),
        ("llava-llama-clip", "text_config", "qk_layernorm", True, "equal"),
        ("llava-llama-clip", "vision_config", "vocab_size", 32000, "equal"),
        ("llava-llama-clip", "", "vocab_size", 128, "equal"),
        ("llava-llama-clip", "", "ignore_index", -100, "equal"),
        ("qwen2_5_vl", "vision_config", "in_chans", 1, "equal"),
        ("qwen2_5_vl", "", "vision_token_id", 3, "equal"),
        ("qwen2_5_vl", "text_config", "rope_scaling", {"type": "mrope", "mrope_section": [4, 2, 2]}, "equal"),
        ("qwen2_audio", "audio_config", "is_causal", False, "equal"),
        ("qwen3_asr", "audio_config", "layer_norm_eps", 1e-2, "equal"),
        ("qwen3_omni", "text_config", "shared_expert_intermediate_size", 0, "equal"),
        ("qwen3_omni", "text_config", "use_qk_norm", True, "equal"),
        ("qwen3_omni", "", "seconds_per_chunk", 4, "equal"),
        # for weights or layers of another kind
        ("qwen3_vl", "text_config", "per_layer_config", {"0": {"num_key_value_heads": 4}}, "refused"),
    ],
)
def test_an_undeclared_field_is_harmless_or_refused(
    tmp_path: Path, family: str, part: str, name: str, value: Any, expected: str
) -> None:
    outcome, why = _outcome(tmp_path, odd_models.config_of(family, (part, name, value)), name)
    if outcome == "cannot build":
        outcome, why = _refusal(tmp_path, name)
    assert outcome == expected, why


def _refusal(path: Path, name: str) -> tuple[str, str]:
    try:
        read_config(path)
    except ValueError as error:
        return ("refused" if name in str(error) else "wrong"), str(error)
    return "wrong", "read"


@pytest.mark.parametrize("part", ["", "text_config", "vision_config"])
def test_quantised_weights_are_refused(tmp_path: Path, part: str) -> None:
    change = (part, "quantization_config", {"quant_method": "fp8", "weight_block_size": [128, 128]})
    (tmp_path / "config.json").write_text(json.dumps(odd_models.config_of("qwen2_5_vl", change)))
    with pytest.raises(ValueError, match=rf"{part}.*quantization_config: .*quantised weights"):
        read_config(tmp_path)
