"""Tiny random checkpoints of families that take sounds, with their feature extractors and tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, AutoModelForMultimodalLM, AutoTokenizer, GenerationConfig

from epd_serve.demo import weights_dir

_INIT = {"initializer_range": 0.2}
_TOWER: dict[str, Any] = {
    "num_mel_bins": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "d_model": 64,
    **_INIT,
}
_PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"


@dataclass(frozen=True, kw_only=True)
class TinyAudio:
    """One family's tiny model.

    Attributes:
        text, audio, top: fields of the parts of its configuration; of the top, ids of the tokens that are named.
        vision: of its tower for pictures and videos, if it has one. image: of their processor.
        shown: what a chat shows of an item, by its modality. named: tokens that the processor asks for.
        processor: of processor_config.json. extractor: the class of its feature extractor.
    """

    model_type: str
    text: dict[str, Any]
    audio: dict[str, Any]
    top: dict[str, Any]
    shown: dict[str, str]
    named: dict[str, str] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=dict)
    image: dict[str, Any] = field(default_factory=dict)
    processor: dict[str, Any] = field(default_factory=dict)
    extractor: str = "WhisperFeatureExtractor"
    #: Seconds that it hears at a time.
    chunk_s: int = 4


_VISION = {
    "depth": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "out_hidden_size": 128,
    **_INIT,
}
_AROUND = {
    "vision_start_token_id": "<|vision_bos|>",
    "vision_end_token_id": "<|vision_eos|>",
    "audio_start_token_id": "<|audio_bos|>",
    "audio_end_token_id": "<|audio_eos|>",
}
#: Tokens and pictures of models that hear and see.
_OMNI: dict[str, Any] = {
    "image": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": 56 * 56,
        "max_pixels": 140 * 140,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
    },
    "shown": {
        "image": "<|vision_bos|><|IMAGE|><|vision_eos|>",
        "video": "<|vision_bos|><|VIDEO|><|vision_eos|>",
        "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
    },
    "named": {
        "image_token": "<|IMAGE|>",
        "video_token": "<|VIDEO|>",
        "audio_token": "<|AUDIO|>",
        "vision_bos_token": "<|vision_bos|>",
        "vision_eos_token": "<|vision_eos|>",
        "audio_bos_token": "<|audio_bos|>",
        "audio_eos_token": "<|audio_eos|>",
    },
}

TINY_AUDIO = {
    "qwen2_audio": TinyAudio(
        model_type="qwen2_audio",
        text={"model_type": "qwen2"},
        audio={"model_type": "qwen2_audio_encoder", "max_source_positions": 200, **_TOWER},
        top={"audio_token_index": "<|AUDIO|>"},
        shown={"audio": "<|audio_bos|><|AUDIO|><|audio_eos|>"},
    ),
    "qwen3_asr": TinyAudio(
        model_type="qwen3_asr",
        text={"model_type": "qwen3", "head_dim": 32},
        audio={"downsample_hidden_size": 16, "n_window_infer": 200, "output_dim": 128, **_TOWER},
        top={"audio_token_id": "<|audio_pad|>"},
        shown={"audio": "<|audio_bos|><|audio_pad|><|audio_eos|>"},
        named={
            "audio_token": "<|audio_pad|>",
            "audio_bos_token": "<|audio_bos|>",
            "audio_eos_token": "<|audio_eos|>",
        },
        extractor="Qwen3ASRFeatureExtractor",
    ),
    "qwen2_5_omni": TinyAudio(
        model_type="qwen2_5_omni_thinker",
        text={
            "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e6},
            "max_position_embeddings": 4096,
        },
        audio={"n_window": 20, "output_dim": 128, **_TOWER},
        vision={**_VISION, "window_size": 112, "fullatt_block_indexes": [3]},
        top={
            "image_token_index": "<|IMAGE|>",
            "video_token_index": "<|VIDEO|>",
            "audio_token_index": "<|AUDIO|>",
            **_AROUND,
        },
        processor={"processor_class": "Qwen2_5OmniProcessor"},
        **_OMNI,
    ),
    "qwen3_omni": TinyAudio(
        model_type="qwen3_omni_moe_thinker",
        text={
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [4, 6, 6],
                "mrope_interleaved": True,
                "rope_theta": 1e6,
            },
            "max_position_embeddings": 4096,
            "head_dim": 32,
            "initializer_range": 0.3,  # for answers of many tokens
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "mlp_only_layers": [1],
        },
        audio={"downsample_hidden_size": 16, "n_window_infer": 200, "output_dim": 128, **_TOWER},
        vision={
            **_VISION,
            "patch_size": 14,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [0, 1, 2],
        },
        top={
            "image_token_id": "<|IMAGE|>",
            "video_token_id": "<|VIDEO|>",
            "audio_token_id": "<|AUDIO|>",
            **_AROUND,
        },
        processor={"processor_class": "Qwen3OmniMoeProcessor"},
        **_OMNI,
    ),
}


def make_tiny_audio(
    tiny: TinyAudio, path: Path, text: Callable[..., dict[str, Any]], normalisation: dict[str, Any]
) -> None:
    """Build a model in ``path``. ``text`` makes the fields of its text config."""
    tokenizer: Any = AutoTokenizer.from_pretrained(weights_dir(), extra_special_tokens=tiny.named)
    tokenizer.add_tokens([*tiny.top.values(), "<|audio_bos|>", "<|audio_eos|>"], special_tokens=True)
    tokenizer.chat_template = _template(tiny.shown)
    config = AutoConfig.for_model(
        tiny.model_type,
        text_config=text(len(tokenizer), **tiny.text),
        audio_config=tiny.audio,
        **({"vision_config": tiny.vision} if tiny.vision else {}),
        **{name: tokenizer.convert_tokens_to_ids(token) for name, token in tiny.top.items()},
    )
    model: Any = AutoModelForMultimodalLM.from_config(config)
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    if tiny.processor:
        (path / "processor_config.json").write_text(json.dumps(tiny.processor))
    getattr(transformers, tiny.extractor)(feature_size=32, chunk_length=tiny.chunk_s).save_pretrained(path)
    if tiny.image:
        file = path / "preprocessor_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **normalisation, **tiny.image}))


def _template(shown: dict[str, str]) -> str:
    """The built-in model's, with what is shown of an item of each modality."""
    template = (weights_dir() / "chat_template.jinja").read_text()
    line = next(line for line in template.splitlines() if "'image'" in line)
    assert _PICTURE in template
    template = template.replace(f"{line}\n{_PICTURE}", "BRANCHES")
    branches = [f"{{%- elif part['type'] == '{kind}' -%}}\n{text}" for kind, text in shown.items()]
    return template.replace("BRANCHES", "\n".join(branches).replace("elif", "if", 1))
