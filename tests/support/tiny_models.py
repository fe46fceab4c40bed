"""Tiny models of real architectures with random weights, saved as transformers directories.

Their tokenizer is the built-in model's; their logits are spread out enough that float32 rounding changes no token.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_audio import TINY_AUDIO, make_tiny_audio
from tiny_families import GEMMA3, LIKE_ANOTHER, QWEN3_5, TINY, make_tiny_family
from transformers import (
    AddedToken,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from epd_serve.demo import weights_dir

KINDS = ("qwen2_5_vl", "qwen3_vl", "llava")
#: Those that take videos, besides OMNI_KINDS.
VIDEO_KINDS = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
#: Those that take sounds; of these, those that take pictures as well.
AUDIO_KINDS = (*TINY_AUDIO, "gemma4", "gemma4_unified")
OMNI_KINDS = tuple(kind for kind, tiny in TINY_AUDIO.items() if tiny.vision)
_SLOW_OMNI = tuple(pytest.param(kind, marks=[pytest.mark.slow]) for kind in OMNI_KINDS)
ALL_VIDEO_KINDS = (*VIDEO_KINDS, "gemma4", "gemma4_unified", *_SLOW_OMNI)
#: Those with recurrent states.
STATE_KINDS = ("qwen3_5", "qwen3_5_moe")
#: With those whose pictures are tiles or rows.
ALL_KINDS = (
    *KINDS,
    STATE_KINDS[0],
    pytest.param(STATE_KINDS[1], marks=pytest.mark.slow),
    *_SLOW_OMNI,
    *(pytest.param(kind, marks=[pytest.mark.slow] if kind in LIKE_ANOTHER else []) for kind in TINY),
)
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_QWEN3_5: dict[str, Any] = {
    **QWEN3_5,
    "rope_parameters": {
        "rope_type": "default",
        "mrope_interleaved": True,
        "mrope_section": [4, 2, 2],
        "partial_rotary_factor": 0.5,
        "rope_theta": 1e6,
    },
}
_QWEN3_5_MOE = {**_QWEN3_5, **_EXPERTS, "shared_expert_intermediate_size": 32}
#: Kinds without a tower, with fields that differ from their text config's usual ones.
TEXT_KINDS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": None},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 48},
    "qwen3_moe": {"head_dim": 48, **_EXPERTS, "mlp_only_layers": [1], "norm_topk_prob": True},
    "gemma3_text": GEMMA3,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5_MOE,
}
_INIT = {"initializer_range": 0.2}
#: transformers has these where a model's file has nothing; vLLM then leaves pixels as they are.
_NORMALISATION = {
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


def _text(vocab_size: int, **extra: Any) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **_INIT,
        **extra,
    }


def _mrope(**extra: Any) -> dict[str, Any]:
    return {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e6, **extra}


#: As Qwen3.5's: thoughts between tags, tools as XML.
THINKING_TEMPLATE = """\
{%- macro show(content) -%}
{%- if content is string -%}{{ content }}{%- else -%}{%- for part in content or [] -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' -%}<|vision_start|><|video_pad|><|vision_end|>
{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
{{- '<|im_start|>system\n<tools>' }}{%- for tool in tools -%}{{ '\n' + (tool | tojson) }}{%- endfor -%}
{{- '\n</tools><|im_end|>\n' }}
{%- endif -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' -%}{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{%- endif -%}
{{- show(m.content) }}
{%- for call in m.tool_calls or [] -%}
{{- '\n' if not loop.first else '' }}{{ '<tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for name, value in call.function.arguments | items -%}
{{- '<parameter=' + name + '>\n' + (value if value is string else value | tojson) + '\n</parameter>\n' }}
{%- endfor -%}
{{- '</function>\n</tool_call>' }}
{%- endfor -%}
{{- '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n<think>\n' }}
{%- if enable_thinking is defined and not enable_thinking -%}{{ '\n</think>\n\n' }}{%- endif -%}
{%- endif -%}
"""


def make_tiny_model(kind: str, path: Path, *, seed: int = 0, thinks: bool = False, **text: Any) -> Path:
    """Build the model of a kind in ``path``. ``text`` overrides fields of the text config; ``thinks``: with
    THINKING_TEMPLATE and tokens for its tags."""
    if kind in TINY_AUDIO:
        torch.manual_seed(seed)
        make_tiny_audio(
            TINY_AUDIO[kind], path, lambda vocab, **extra: _text(vocab, **{**extra, **text}), _NORMALISATION
        )
        return path
    if kind in TINY:
        torch.manual_seed(seed + 1)
        make_tiny_family(TINY[kind], path, lambda vocab, **extra: _text(vocab, **extra, **text), _NORMALISATION)
        return path
    tokenizer = AutoTokenizer.from_pretrained(weights_dir())
    image, start, end, video = tokenizer.convert_tokens_to_ids(
        ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"]
    )
    if thinks:
        tags = ("<think>", "</think>", "<tool_call>", "</tool_call>")
        tokenizer.add_tokens([AddedToken(one, special=False, normalized=False) for one in tags])
    vision_tokens = {
        "image_token_id": image,
        "video_token_id": video,
        "vision_start_token_id": start,
        "vision_end_token_id": end,
    }
    vision = {
        "depth": 4,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": 128,
        **_INIT,
    }
    vocab = len(tokenizer)
    torch.manual_seed(seed)
    model: Any
    if kind in TEXT_KINDS:
        config = AutoConfig.for_model(kind, **_text(vocab, **TEXT_KINDS[kind], **text))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    elif kind == "qwen2_5_vl":
        model = Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(
                text_config=_text(vocab, rope_parameters=_mrope(), **text),
                vision_config={**vision, "window_size": 112, "fullatt_block_indexes": [3]},
                tie_word_embeddings=True,
                **vision_tokens,
            )
        )
    elif kind == "qwen3_vl":
        model = Qwen3VLForConditionalGeneration(
            Qwen3VLConfig(
                text_config=_text(vocab, head_dim=32, rope_parameters=_mrope(mrope_interleaved=True), **text),
                vision_config={
                    **vision,
                    "patch_size": 14,
                    "num_position_embeddings": 256,
                    "deepstack_visual_indexes": [0, 1, 2],
                },
                **vision_tokens,
            )
        )
    elif kind in STATE_KINDS:
        fields = _QWEN3_5 if kind == "qwen3_5" else _QWEN3_5_MOE
        config = AutoConfig.for_model(
            kind,
            text_config=_text(vocab, **fields, **text),
            vision_config={**vision, "patch_size": 14, "num_position_embeddings": 256},
            **vision_tokens,
        )
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    else:
        model = LlavaForConditionalGeneration(
            LlavaConfig(
                text_config=_text(vocab, model_type="llama", **text),
                vision_config={
                    "model_type": "clip_vision_model",
                    "hidden_size": 64,
                    "intermediate_size": 128,
                    "num_hidden_layers": 3,
                    "num_attention_heads": 4,
                    "image_size": 56,
                    "patch_size": 14,
                    "projection_dim": 64,
                },
                image_token_index=image,
                image_seq_length=16,
            )
        )
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(weights_dir() / name, path / name)
    if thinks:
        tokenizer.chat_template = THINKING_TEMPLATE
        tokenizer.save_pretrained(path)
    if kind not in TEXT_KINDS:
        (path / "preprocessor_config.json").write_text(json.dumps(_preprocessor(kind)))
    if kind in VIDEO_KINDS:
        (path / "video_preprocessor_config.json").write_text(json.dumps(_video_preprocessor(kind)))
        template = path / "chat_template.jinja"
        image = "<|vision_start|><|image_pad|><|vision_end|>"
        video = "{%- elif part['type'] == 'video' -%}" + image.replace("image", "video")
        if not thinks:
            template.write_text(template.read_text().replace(image, image + video, 1))
    if kind == "llava":
        processor = {
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        }
        names = {"processor_class": "LlavaProcessor", "image_token": "<|image_pad|>"}
        (path / "processor_config.json").write_text(json.dumps({**names, **processor}))
    return path


def _video_preprocessor(kind: str) -> dict[str, Any]:
    """Bounds of a frame, or of all frames together."""
    is_whole = kind != "qwen2_5_vl"
    return {
        "video_processor_type": "Qwen3VLVideoProcessor" if is_whole else "Qwen2VLVideoProcessor",
        "size": {"shortest_edge": 56 * 56, "longest_edge": (12 if is_whole else 1) * 84 * 84},
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_frames": 4,
        "max_frames": 12,
        "fps": 2,
        **_NORMALISATION,
    }


def _preprocessor(kind: str) -> dict[str, Any]:
    if kind == "llava":
        return {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 56},
            "crop_size": {"height": 56, "width": 56},
            "do_center_crop": True,
            **_NORMALISATION,
        }
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": 56 * 56,
        "max_pixels": 140 * 140,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        **_NORMALISATION,
    }
