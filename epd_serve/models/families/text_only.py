"""Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE: language models without a tower."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from epd_serve.errors import InvalidRequest
from epd_serve.models.family import Family, Size


class TextOnly(Family):
    """Language models without a tower; plain rotary positions."""

    title = "Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE"
    model_types: ClassVar[tuple[str, ...]] = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
    mixtures = ("qwen3_moe",)
    modalities = ()

    def __init__(self, config: Any) -> None:
        super().__init__(config, None)

    def parts(self, size: Size) -> Sequence[int | str]:
        raise InvalidRequest("the model takes text alone; leave out the images", param="messages")

    def check(self) -> None:
        pass
