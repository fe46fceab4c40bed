"""Aya Vision: tiles of one size, each named by its number; most layers of Cohere2 attend inside a window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from epd_serve.models.family import PATCH_TOWER, TEXT, Family, Size, names

#: As many as its image processor makes, and the whole picture.
_MOST_TILES = 12


class AyaVision(Family):
    """Tiles behind their numbers, and the whole picture behind its name."""

    title = "Aya Vision"
    model_types = ("aya_vision",)
    decoder = "generic"
    texts: ClassVar = {
        "cohere2": TEXT
        | names(
            "head_dim hidden_act layer_norm_eps attention_bias sliding_window layer_types logit_scale",
        )
    }
    fields = names(
        "image_token_index vision_feature_layer downsample_factor adapter_layer_norm_eps tie_word_embeddings",
        "alignment_intermediate_size",
    )
    towers: ClassVar = {"siglip_vision_model": PATCH_TOWER | {"vision_use_head"}}
    tokens = (
        "<|START_OF_IMG|>",
        "<|END_OF_IMG|>",
        "TILE_GLOBAL",
        *(f"TILE_{number}" for number in range(1, _MOST_TILES + 1)),
    )
    shown = "<image>"

    def __init__(self, config: Any, image_processor: Any) -> None:
        super().__init__(config, image_processor)
        self.processor_options = {"crop_to_patches": True}  # whatever preprocessor_config.json says
        self._side: int = config.vision_config.image_size
        self._tile_tokens = (self._side // config.vision_config.patch_size // config.downsample_factor) ** 2
        self.processor_fields = {"img_size": self._side}

    def _num_tiles(self, size: Size) -> int:
        tiles: int = self.processor.get_number_of_image_patches(size[1], size[0], self.processor_options)
        return tiles

    def parts(self, size: Size) -> Sequence[int | str]:
        start, end, whole, *tiles = self.tokens
        parts: list[int | str] = [start]
        for name in (*tiles[: self._num_tiles(size) - 1], whole):
            parts += (name, self._tile_tokens)
        return [*parts, end]

    def num_pixels(self, size: Size) -> int:
        return self._num_tiles(size) * self._side**2

    def check_pictures(self) -> None:
        if self.processor.max_patches > _MOST_TILES:
            raise ValueError(
                f"max_patches of preprocessor_config.json is {self.processor.max_patches}; tiles have names up to "
                f"{_MOST_TILES}"
            )
        super().check_pictures()
