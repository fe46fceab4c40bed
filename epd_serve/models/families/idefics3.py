"""Idefics3, SmolVLM and SmolVLM2: tiles of one size, each named by its row and column, and the whole picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from epd_serve.models.family import PATCH_TOWER, Family, Pixels, Size, TowerInputs, names

_AROUND = "<fake_token_around_image>"
#: As many as its tokenizers have.
_ROWS = 6


class Idefics3(Family):
    """Rows and columns of tiles with their names between the runs of their features."""

    title = "Idefics3, SmolVLM, SmolVLM2"
    model_types = ("idefics3", "smolvlm")
    fields = names("image_token_id scale_factor tie_word_embeddings")
    towers: ClassVar = {"idefics3_vision": PATCH_TOWER, "smolvlm_vision": PATCH_TOWER}

    tokens = (
        _AROUND,
        "<global-img>",
        *(f"<row_{row}_col_{column}>" for row in range(1, _ROWS + 1) for column in range(1, _ROWS + 1)),
    )

    def __init__(self, config: Any, image_processor: Any) -> None:
        super().__init__(config, image_processor)
        self._tile: int = image_processor.max_image_size["longest_edge"]
        self._tile_tokens = (self._tile // config.vision_config.patch_size) ** 2 // config.scale_factor**2
        self.processor_fields = {"image_seq_len": self._tile_tokens}

    def _tiles(self, size: Size) -> tuple[int, int]:
        _, rows, columns = self.processor.get_number_of_image_patches(size[1], size[0])
        return rows, columns

    def parts(self, size: Size) -> Sequence[int | str]:
        return [*self._tile_parts(*self._tiles(size)), self._tile_tokens, _AROUND]

    def _tile_parts(self, rows: int, columns: int) -> Iterator[int | str]:
        for row in range(rows):
            for column in range(columns):
                newline = "\n" if row and not column else ""
                yield f"{newline}{_AROUND}<row_{row + 1}_col_{column + 1}>"
                yield self._tile_tokens
        yield "\n\n" * bool(rows) + f"{_AROUND}<global-img>"

    def num_pixels(self, size: Size) -> int:
        rows, columns = self._tiles(size)
        return (rows * columns + 1) * self._tile**2

    def preprocess(self, pixels: Pixels) -> TowerInputs:
        inputs = super().preprocess(pixels)
        return {"pixel_values": inputs["pixel_values"].transpose(0, 1)}  # tiles of several pictures are joined
