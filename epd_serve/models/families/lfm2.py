"""LFM2, and LFM2-VL: small pictures in their own proportions, large ones as tiles of one size and a whole.

Most layers of LFM2 are short convolutions, which keep their last inputs instead of K and V.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from epd_serve.errors import InvalidRequest
from epd_serve.models.families.text_only import TextOnly
from epd_serve.models.family import PATCH_TOWER, TEXT, Family, Pixels, Size, TowerInputs, names

_MOST_TILES = 10
_DEFAULTS = {
    "downsample_factor": 2,
    "do_image_splitting": True,
    "min_tiles": 2,
    "max_tiles": _MOST_TILES,
    "use_thumbnail": True,
    "min_image_tokens": 64,
    "max_image_tokens": 256,
    "encoder_patch_size": 16,
    "tile_size": 512,
    "max_pixels_tolerance": 2.0,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "size": None,  # of which nothing follows
}


class Lfm2(TextOnly):
    """LFM2 without a tower."""

    title = "LFM2 (text)"
    model_types = ("lfm2",)
    decoder = "generic"
    texts: ClassVar = {
        "lfm2": TEXT
        | names(
            "head_dim norm_eps conv_bias conv_L_cache",
            "block_multiple_of block_ffn_dim_multiplier block_auto_adjust_ff_dim full_attn_idxs layer_types",
        )
    }


class Lfm2VL(Family):
    """Rows and columns of tiles behind their names, and the whole picture; of a small picture, this alone."""

    title = "LFM2-VL"
    model_types = ("lfm2_vl",)
    decoder = "generic"
    texts = Lfm2.texts
    fields = names(
        "image_token_id projector_hidden_act projector_hidden_size projector_bias projector_use_layernorm",
        "downsample_factor tie_word_embeddings",
    )
    towers: ClassVar = {"siglip2_vision_model": PATCH_TOWER - {"image_size"} | {"num_patches", "vision_use_head"}}
    joins = False  # tiles and the whole picture are calls of their own
    tokens = (
        "<|image_start|>",
        "<|image_end|>",
        "<|img_thumbnail|>",
        *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 11) for column in range(1, 11)),
    )

    def __init__(self, config: Any, image_processor: Any) -> None:
        super().__init__(config, image_processor)
        self.processor_fields = {"use_image_special_tokens": True}
        self.picture_fields = {
            "encoder_patch_size": config.vision_config.patch_size,
            "downsample_factor": config.downsample_factor,
        }
        self._unit: int = config.vision_config.patch_size * config.downsample_factor  # the side of a token

    @staticmethod
    def read_pictures(path: Path) -> Any:
        from epd_serve.models.picture_processor import PictureProcessor

        return PictureProcessor.read(path, **_DEFAULTS)

    @property
    def _longest(self) -> int:
        """Most tokens of a tile or of the whole picture."""
        of_tile = (self.processor.tile_size // self._unit) ** 2 if self.processor.do_image_splitting else 0
        return max(int(self.processor.max_image_tokens), of_tile)

    def _whole(self, size: Size) -> Size:
        """The size of the whole picture: whole tokens, no fewer and no more than is said."""
        processor, unit, area = self.processor, self._unit, size[0] * size[1]
        fewest, most = processor.min_image_tokens * unit**2, processor.max_image_tokens * unit**2
        width, height = (max(unit, round(length / unit) * unit) for length in size)
        if width * height > most:
            shrink = math.sqrt(area / most)
            width, height = (max(unit, math.floor(length / shrink / unit) * unit) for length in size)
        elif width * height < fewest:
            grow = math.sqrt(fewest / area)
            width, height = (math.ceil(length * grow / unit) * unit for length in size)
        num_tokens, longest = width * height // unit**2, self._longest
        if num_tokens > longest:
            raise InvalidRequest(
                f"an image of {size[0]}x{size[1]} pixels cannot be used: it is so narrow that it has {num_tokens} "
                f"tokens, where {longest} are the most"
            )
        return width, height

    def _grid(self, size: Size) -> tuple[int, int]:
        """Rows and columns of tiles; (1, 1) for a picture that is whole alone."""
        processor = self.processor
        patch: int = processor.encoder_patch_size
        least, most = processor.min_tiles, processor.max_tiles
        width, height = (max(patch, round(length / self._unit) * self._unit) for length in size)
        is_large = width * height > processor.max_image_tokens * self._unit**2 * processor.max_pixels_tolerance
        if not (is_large and processor.do_image_splitting) or most == 1:
            return 1, 1
        ratios = {
            (columns, rows)
            for count in range(least, most + 1)
            for columns in range(1, count + 1)
            for rows in range(1, count + 1)
            if least <= columns * rows <= most
        }
        best, nearest = (1, 1), math.inf
        for columns, rows in sorted(
            ratios, key=math.prod
        ):  # of equals the larger, where the picture fills half of it
            distance = abs(size[0] / size[1] - columns / rows)
            half = 0.5 * processor.tile_size**2 * columns * rows
            if distance < nearest or (distance == nearest and size[0] * size[1] > half):
                best, nearest = (rows, columns), distance
        return best

    def parts(self, size: Size) -> Sequence[int | str]:
        start, end, thumbnail, *_ = self.tokens
        rows, columns = self._grid(size)
        num_whole = math.prod(self._whole(size)) // self._unit**2
        if rows * columns == 1:
            return start, num_whole, end
        parts: list[int | str] = [start]
        for row in range(rows):
            for column in range(columns):
                num_of_tile = (self.processor.tile_size // self._unit) ** 2
                parts += (f"<|img_row_{row + 1}_col_{column + 1}|>", num_of_tile)
        whole: list[int | str] = [thumbnail, num_whole] if self.processor.use_thumbnail else []
        return [*parts, *whole, end]

    def num_pixels(self, size: Size) -> int:
        return self.num_image_tokens(size) * self._unit**2

    def preprocess(self, pixels: Pixels) -> TowerInputs:
        """Patches of all tiles and of the whole picture [patches, values], and the rows and columns of each."""
        import torch

        from epd_serve.models.picture_processor import tiles

        size = pixels.shape[1], pixels.shape[0]
        side, patch = self.processor.tile_size, self.processor.encoder_patch_size
        rows, columns = self._grid(size)
        made: list[Any] = []
        if rows * columns > 1:
            made += tiles(self.processor.resized(pixels, (columns * side, rows * side)), rows, columns)
        if rows * columns == 1 or self.processor.use_thumbnail:
            made.append(self.processor.resized(pixels, self._whole(size)))
        shapes = [(one.shape[1] // patch, one.shape[2] // patch) for one in made]
        values = [
            tiles(self.processor.normalised(one), *shape).permute(0, 2, 3, 1).flatten(1)
            for one, shape in zip(made, shapes, strict=True)
        ]
        return {"pixel_values": torch.cat(values), "spatial_shapes": torch.tensor(shapes)}

    @staticmethod
    def features(model: Any, inputs: TowerInputs) -> Any:
        """Without padding, which the tower would mask: what is of one shape in one call."""
        import torch

        shapes = [tuple(shape) for shape in inputs["spatial_shapes"].tolist()]
        patches = torch.split(inputs["pixel_values"], [rows * columns for rows, columns in shapes])
        rows: list[Any] = []
        output: Any = None
        for shape in dict.fromkeys(shapes):
            values = torch.stack([one for one, own in zip(patches, shapes, strict=True) if own == shape])
            output = model.get_image_features(
                pixel_values=values,
                spatial_shapes=torch.tensor([shape] * len(values)),
                pixel_attention_mask=values.new_ones(values.shape[:2], dtype=torch.int32),
                return_dict=True,
            )
            rows += output.pooler_output
        output.pooler_output = [torch.cat(rows)]
        return output

    def check_pictures(self) -> None:
        processor = self.processor
        if not 2 <= processor.min_tiles <= processor.max_tiles <= _MOST_TILES:
            raise ValueError(f"min_tiles and max_tiles of preprocessor_config.json must be 2 to {_MOST_TILES}")
        if processor.tile_size % self._unit:
            raise ValueError(f"tile_size of preprocessor_config.json must be a multiple of {self._unit}")
        super().check_pictures()
