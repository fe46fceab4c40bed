"""Pixtral and Mistral Small 3: images of any resolution, with a token after each row of patches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from epd_serve.errors import InvalidRequest
from epd_serve.models.family import PATCH_TOWER, Family, Size, names


class Pixtral(Family):
    """Images of any resolution up to a longest edge."""

    title = "Mistral Small 3, Pixtral"
    model_types = ("mistral3", "llava")
    fields = names(
        "image_token_index projector_hidden_act vision_feature_layer multimodal_projector_bias spatial_merge_size",
        "vision_feature_select_strategy tie_word_embeddings",
    )
    towers: ClassVar = {"pixtral": PATCH_TOWER | names("rope_parameters head_dim")}
    input_names = ("pixel_values", "image_sizes")
    tokens = ("[IMG_BREAK]", "[IMG_END]")
    joins = False  # images may be separated only by a mask, which the attention ignores

    def __init__(self, config: Any, image_processor: Any) -> None:
        super().__init__(config, image_processor)
        patch = config.vision_config.patch_size
        self._merge: int = getattr(config, "spatial_merge_size", 1)
        self._side: int = patch * self._merge
        self.processor_options = {"patch_size": self._side}
        self.processor_fields = {
            "patch_size": patch,
            "spatial_merge_size": self._merge,
            "image_break_token": self.tokens[0],
            "image_end_token": self.tokens[1],
        }

    def _grid(self, size: Size) -> tuple[int, int]:
        width, height = size
        ratio = max(width, height) / self.processor.size["longest_edge"]
        if ratio > 1:
            width, height = int(width / ratio), int(height / ratio)
        grid = -(-height // self._side), -(-width // self._side)
        least = 1 if self._merge == 1 else 2  # transformers' projector rejects a single token
        if grid[0] * grid[1] < least:
            raise InvalidRequest(
                f"an image of {size[0]}x{size[1]} pixels cannot be used: scaled to {width}x{height}, it has fewer "
                f"than {least} tokens"
            )
        return grid

    def parts(self, size: Size) -> Sequence[int | str]:
        rows, columns = self._grid(size)
        line, end = self.tokens
        row: list[int | str] = [columns, line]
        return [*row * (rows - 1), columns, end]

    def num_pixels(self, size: Size) -> int:
        rows, columns = self._grid(size)
        return rows * columns * self._side**2
