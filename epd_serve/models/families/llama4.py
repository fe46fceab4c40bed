"""Llama 4: tiles of one size; most layers attend inside chunks of the context, the others know no positions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from epd_serve.models.family import TEXT, Family, Pixels, Size, TowerInputs, names


class Llama4(Family):
    """Tiles in rows, separated by tokens, and the whole picture."""

    title = "Llama 4"
    model_types = ("llama4",)
    decoder = "generic"
    texts: ClassVar = {
        "llama4_text": TEXT
        | names(
            "intermediate_size_mlp head_dim hidden_act rms_norm_eps",
            "attention_bias num_experts_per_tok num_local_experts moe_layers use_qk_norm",
            "interleave_moe_layer_step no_rope_layers no_rope_layer_interval attention_chunk_size layer_types",
            "attn_temperature_tuning floor_scale attn_scale router_jitter_noise",
        )
    }
    fields = names("image_token_index boi_token_index eoi_token_index tie_word_embeddings")
    towers: ClassVar = {
        "llama4_vision_model": names(
            "hidden_size num_hidden_layers num_attention_heads num_channels intermediate_size vision_output_dim",
            "image_size patch_size pixel_shuffle_ratio projector_input_dim projector_output_dim rope_parameters",
            "projector_dropout",
        )
    }
    tokens = ("<|image_start|>", "<|tile_x_separator|>", "<|tile_y_separator|>", "<|image|>", "<|image_end|>")
    shown = "<|image|>"

    def __init__(self, config: Any, image_processor: Any) -> None:
        super().__init__(config, image_processor)
        vision = config.vision_config
        self._side: int = vision.image_size
        self._tile_tokens = int(self._side // vision.patch_size * vision.pixel_shuffle_ratio) ** 2
        self.picture_fields = {"size": {"height": self._side, "width": self._side}}
        self.processor_fields = {name: getattr(vision, name) for name in ("patch_size", "pixel_shuffle_ratio")}

    @staticmethod
    def read_pictures(path: Path) -> Any:
        from epd_serve.models.picture_processor import PictureProcessor

        halves = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        size = {"height": 336, "width": 336}
        return PictureProcessor.read(path, size=size, max_patches=16, resize_to_max_canvas=False, **halves)

    def _grid(self, size: Size) -> tuple[int, int]:
        """Rows and columns of tiles: a picture grows as little as it can, or shrinks as little as it must."""
        import numpy as np

        most = self.processor.max_patches
        by_ratio: dict[float, list[Size]] = {}
        for count in range(most, 0, -1):
            for rows in (rows for rows in range(1, count + 1) if count % rows == 0):
                by_ratio.setdefault(rows / (count // rows), []).append((rows, count // rows))
        grids = [grid for of_ratio in by_ratio.values() for grid in of_ratio]
        sides = np.array(grids, np.float32) * np.float32(self._side)
        scales = (sides / np.array(size[::-1], np.float32)).min(1)
        growing = scales[scales >= 1]
        pick = growing.max if self.processor.resize_to_max_canvas else growing.min
        scale = pick() if len(growing) else scales.max()
        return min((grid for grid, one in zip(grids, scales, strict=True) if one == scale), key=np.prod)

    def _inside(self, size: Size, rows: int, columns: int) -> Size:
        """The size to which a picture is brought inside its tiles: small ones no larger than a tile."""
        import numpy as np

        # transformers' numbers are float32 where tiles are the bound, else Python's
        bounds: list[Any] = [np.float32(count * self._side) for count in (columns, rows)]
        if not self.processor.resize_to_max_canvas:
            bounds = [min(max(length, self._side), bound) for length, bound in zip(size, bounds, strict=True)]
        by_width, by_height = (bound / length for bound, length in zip(bounds, size, strict=True))
        width, height = map(int, bounds)
        if by_width < by_height:
            return width, max(min(int(size[1] * by_width), height), 1)
        return max(min(int(size[0] * by_height), width), 1), height

    def parts(self, size: Size) -> Sequence[int | str]:
        start, between, row_end, whole, end = self.tokens
        rows, columns = self._grid(size)
        parts: list[int | str] = [start]
        for _ in range(rows if rows * columns > 1 else 0):
            parts += [self._tile_tokens, *(between, self._tile_tokens) * (columns - 1), row_end]
        return [*parts, whole, self._tile_tokens, end]

    def num_pixels(self, size: Size) -> int:
        rows, columns = self._grid(size)
        return (rows * columns + (rows * columns > 1)) * self._side**2

    def preprocess(self, pixels: Pixels) -> TowerInputs:
        import torch
        import torch.nn.functional as F

        from epd_serve.models.picture_processor import tiles

        size, side = (pixels.shape[1], pixels.shape[0]), self._side
        rows, columns = self._grid(size)
        inside = self.processor.resized(pixels, self._inside(size, rows, columns))
        padded = F.pad(inside, (0, columns * side - inside.shape[2], 0, rows * side - inside.shape[1]))
        made = tiles(self.processor.normalised_coarsely(padded), rows, columns)
        if rows * columns > 1:
            whole = self.processor.normalised_coarsely(self.processor.resized(pixels, (side, side)))
            made = torch.cat((made, whole[None]))
        return {"pixel_values": made}

    @staticmethod
    def features(model: Any, inputs: TowerInputs) -> Any:
        output = Family.features(model, inputs)
        output.pooler_output = model.multi_modal_projector(output.last_hidden_state)
        return output
