"""LLaVA-1.5: every image is scaled and cropped to one size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from epd_serve.models.family import PATCH_TOWER, Family, Size, names

#: Class tokens of a tower before its patches.
_CLASS_TOKENS = {"clip_vision_model": 1, "siglip_vision_model": 0}


class Llava(Family):
    """One size for every image; plain rotary positions."""

    title = "LLaVA-1.5"
    model_types = ("llava",)
    fields = names(
        "image_token_index projector_hidden_act vision_feature_select_strategy vision_feature_layer",
        "multimodal_projector_bias tie_word_embeddings",
    )
    towers: ClassVar = {"clip_vision_model": PATCH_TOWER, "siglip_vision_model": PATCH_TOWER | {"vision_use_head"}}

    def __init__(self, config: Any, image_processor: Any) -> None:
        super().__init__(config, image_processor)
        vision = config.vision_config
        self._num_pixels: int = vision.image_size**2
        self._num_tokens: int = (vision.image_size // vision.patch_size) ** 2 + _CLASS_TOKENS[vision.model_type]
        if config.vision_feature_select_strategy == "default":
            self._num_tokens -= 1  # the first token is dropped

    def parts(self, size: Size) -> Sequence[int | str]:
        return (self._num_tokens,)

    def num_pixels(self, size: Size) -> int:
        return self._num_pixels
