"""Tiny random checkpoints of families that take sounds, with their feature extractors and tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import (
    AutoTokenizer,
    GenerationConfig,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    WhisperFeatureExtractor,
)

from epd_serve.demo import weights_dir

_SOUND = "<|audio_bos|><|AUDIO|><|audio_eos|>"
_TOWER = {
    "num_mel_bins": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "d_model": 64,
    "initializer_range": 0.2,
}


def make_tiny_audio(kind: str, path: Path, text: Callable[..., dict[str, Any]]) -> None:
    """Build a model in ``path`` that hears up to 4 seconds. ``text`` makes the fields of its text config."""
    assert kind == "qwen2_audio"
    tokenizer: Any = AutoTokenizer.from_pretrained(weights_dir())
    tokenizer.add_tokens(["<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"], special_tokens=True)
    template = (weights_dir() / "chat_template.jinja").read_text()
    picture = "<|vision_start|><|image_pad|><|vision_end|>"
    assert picture in template and "'image'" in template
    tokenizer.chat_template = template.replace(picture, _SOUND).replace("'image'", "'audio'")
    model: Any = Qwen2AudioForConditionalGeneration(
        Qwen2AudioConfig(
            text_config=text(len(tokenizer), model_type="qwen2"),
            audio_config={"model_type": "qwen2_audio_encoder", "max_source_positions": 200, **_TOWER},
            audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
        )
    )
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    WhisperFeatureExtractor(feature_size=32, chunk_length=4).save_pretrained(path)
