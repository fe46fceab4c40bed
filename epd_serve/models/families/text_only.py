"""Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE: language models without a tower."""

from __future__ import annotations

from typing import ClassVar

from epd_serve.models.family import Family


class TextOnly(Family):
    """Language models without a tower; plain rotary positions."""

    title = "Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE"
    model_types: ClassVar[tuple[str, ...]] = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
    modalities = ()
