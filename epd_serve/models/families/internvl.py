"""InternVL 3 and 3.5, in transformers' format: an image becomes tiles of one size and a thumbnail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from epd_serve.models.family import PATCH_TOWER, Family, Size, names


class InternVL(Family):
    """Tiles with patches shuffled into fewer tokens."""

    title = "InternVL 3, 3.5 (the format of transformers)"
    model_types = ("internvl",)
    fields = names(
        "image_token_id downsample_ratio projector_hidden_act vision_feature_layer vision_feature_select_strategy",
        "tie_word_embeddings",
    )
    towers: ClassVar = {
        "internvl_vision": PATCH_TOWER
        | names("attention_bias use_qk_norm norm_type use_mask_token use_absolute_position_embeddings")
        | names("layer_scale_init_value use_mean_pooling hidden_dropout_prob projection_dropout"),
    }

    tokens = ("<img>", "</img>")

    def __init__(self, config: Any, image_processor: Any) -> None:
        super().__init__(config, image_processor)
        self.processor_options = {"crop_to_patches": True}  # overrides preprocessor_config.json
        vision = config.vision_config
        self._tile: tuple[int, int] = tuple(vision.image_size)
        rows, columns = (side // patch for side, patch in zip(self._tile, vision.patch_size, strict=True))
        self._tile_tokens = int(rows * columns * config.downsample_ratio**2)
        self.processor_fields = {"image_seq_length": self._tile_tokens}

    def _num_tiles(self, size: Size) -> int:
        width, height = size
        tiles: int = self.processor.get_number_of_image_patches(height, width, self.processor_options)
        return tiles

    def parts(self, size: Size) -> Sequence[int | str]:
        start, end = self.tokens
        return start, self._num_tiles(size) * self._tile_tokens, end

    def num_pixels(self, size: Size) -> int:
        return self._num_tiles(size) * self._tile[0] * self._tile[1]
