"""LLaVA-1.5, LLaVA-NeXT and LLaVA-OneVision: the image in one size, and in tiles without padding."""

from __future__ import annotations

import math
import sys
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


class LlavaNext(Llava):
    """Tiles of the best-fitting resolution; the tower ends each row of their feature with a newline."""

    title = "LLaVA-NeXT"
    model_types = ("llava_next",)
    fields = Llava.fields | {"image_grid_pinpoints"}
    input_names = ("pixel_values", "image_sizes")

    def __init__(self, config: Any, image_processor: Any) -> None:
        super().__init__(config, image_processor)
        self._tile: int = config.vision_config.image_size
        self._patches: int = self._tile // config.vision_config.patch_size
        self._best = sys.modules[type(image_processor).__module__].select_best_resolution
        self.processor_options = {"do_pad": True}
        self.picture_fields = {"image_grid_pinpoints": config.image_grid_pinpoints}
        self.processor_fields = {"vision_feature_select_strategy": config.vision_feature_select_strategy}

    def _tiles(self, size: Size) -> tuple[int, int]:
        height, width = self._best((size[1], size[0]), self.config.image_grid_pinpoints)
        return height // self._tile, width // self._tile

    def _rows(self, size: Size) -> tuple[int, int]:
        """Return the rows and columns of patches within the image, without padding."""
        width, height = size
        rows, columns = (count * self._patches for count in self._tiles(size))
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        return rows, columns

    def parts(self, size: Size) -> Sequence[int | str]:
        rows, columns = self._rows(size)
        return (self._num_tokens + rows * (columns + 1),)

    def num_pixels(self, size: Size) -> int:
        rows, columns = self._tiles(size)
        return (1 + rows * columns) * self._tile**2

    def check_pictures(self) -> None:
        if self._num_tokens != self._patches**2:
            raise ValueError("vision_feature_select_strategy must select exactly the patches")
        super().check_pictures()


class LlavaOnevision(LlavaNext):
    """LLaVA-NeXT's tiles, with fewer patches for large images."""

    title = "LLaVA-OneVision"
    model_types = ("llava_onevision",)
    fields = LlavaNext.fields | {"video_token_index", "vision_aspect_ratio"}
    towers: ClassVar = {"siglip_vision_model": PATCH_TOWER | {"vision_use_head"}}

    def __init__(self, config: Any, image_processor: Any) -> None:
        super().__init__(config, image_processor)
        self.processor_fields |= {"vision_aspect_ratio": config.vision_aspect_ratio}

    def _rows(self, size: Size) -> tuple[int, int]:
        rows, columns = super()._rows(size)
        most = int(self.config.vision_aspect_ratio.removeprefix("anyres_max_"))
        ratio = math.sqrt(rows * columns / (most * self._patches**2))
        return (int(rows // ratio), int(columns // ratio)) if ratio > 1.1 else (rows, columns)
