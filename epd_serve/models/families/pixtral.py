"""Pixtral and Mistral Small 3: pictures of any resolution, a token after each row of patches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from epd_serve.models.family import PATCH_TOWER, Family, Size, names


class Pixtral(Family):
    """Pictures of any resolution up to a longest edge."""

    title = "Mistral Small 3, Pixtral"
    model_types = ("mistral3", "llava")
    fields = names(
        "image_token_index projector_hidden_act vision_feature_layer multimodal_projector_bias spatial_merge_size",
        "vision_feature_select_strategy tie_word_embeddings",
    )
    towers: ClassVar = {"pixtral": PATCH_TOWER | names("rope_parameters head_dim")}
    input_names = ("pixel_values", "image_sizes")
    joins = False  # a mask, which the attention never sees, may be all that tells pictures apart

    def __init__(self, config: Any, image_processor: Any) -> None:
        super().__init__(config, image_processor)
        patch, merge = config.vision_config.patch_size, getattr(config, "spatial_merge_size", 1)
        self._side: int = patch * merge
        self.processor_options = {"patch_size": self._side}
        self.processor_fields = {
            "patch_size": patch,
            "spatial_merge_size": merge,
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
        }

    def _grid(self, size: Size) -> tuple[int, int]:
        width, height = size
        ratio = max(width, height) / self.processor.size["longest_edge"]
        if ratio > 1:
            width, height = int(width / ratio), int(height / ratio)
        return (height - 1) // self._side + 1, (width - 1) // self._side + 1

    def parts(self, size: Size) -> Sequence[int | str]:
        rows, columns = self._grid(size)
        row: list[int | str] = [columns, "[IMG_BREAK]"]
        return [*row * (rows - 1), columns, "[IMG_END]"]

    def num_pixels(self, size: Size) -> int:
        rows, columns = self._grid(size)
        return rows * columns * self._side**2
