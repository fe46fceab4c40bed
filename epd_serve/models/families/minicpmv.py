"""MiniCPM-V 4.6: a numbered picture and its slices, before Qwen3.5's language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from epd_serve.models.families.qwen3_5 import Qwen35Text
from epd_serve.models.family import PATCH_TOWER, Family, Size, TowerInputs, names


class MiniCPMV(Family):
    """The whole picture behind its number, and rows of slices of it; its videos are not taken."""

    title = "MiniCPM-V 4.6"
    model_types = ("minicpmv4_6",)
    decoder = "generic"
    texts: ClassVar = {"qwen3_5_text": Qwen35Text.texts["qwen3_5_text"]}
    fields = names(
        "insert_layer_id image_size drop_vision_last_layer image_token_id video_token_id tie_word_embeddings",
        "downsample_mode patch_size",
    )
    towers: ClassVar = {"minicpmv4_6_vision": PATCH_TOWER | {"insert_layer_id"}}
    input_names = ("pixel_values", "target_sizes")
    joins = False  # the slices of a picture lie side by side
    tokens = ("<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>")

    def text_before(self, number: int) -> str:
        return f"<image_id>{number}</image_id>" if self.processor.use_image_id else ""

    def _slices(self, size: Size) -> tuple[Size, Size, Size]:
        """Height and width of the whole picture and of a slice; rows and columns of slices."""
        processor, shape = self.processor, (size[1], size[0])
        grid = None
        if processor.slice_mode:
            grid = processor.get_sliced_grid(shape, processor.max_slice_nums, processor.scale_resolution)
        options = (processor.scale_resolution, processor.patch_size, processor.downsample_mode)
        whole = processor.find_best_resize(shape, *options, allow_upscale=grid is None)
        if grid is None:
            return whole, (0, 0), (0, 0)
        rows, columns = grid
        height, width = processor.get_refine_size(shape, grid, *options, allow_upscale=True)
        return whole, (height // rows, width // columns), (rows, columns)

    def parts(self, size: Size) -> Sequence[int | str]:
        whole, one, (rows, columns) = self._slices(size)
        side = self.processor.patch_size * (2 if self.processor.downsample_mode == "4x" else 4)
        num_tokens, num_of_slice = (height * width // side**2 for height, width in (whole, one))
        parts: list[int | str] = ["<image>", num_tokens, "</image>"]
        for row in range(rows):
            parts += ["\n"] * bool(row) + ["<slice>", num_of_slice, "</slice>"] * columns
        return parts

    def num_pixels(self, size: Size) -> int:
        whole, one, (rows, columns) = self._slices(size)
        return whole[0] * whole[1] + rows * columns * one[0] * one[1]

    @staticmethod
    def features(model: Any, inputs: TowerInputs) -> Any:
        import torch

        output = Family.features(model, inputs)
        output.pooler_output = [torch.cat(output.pooler_output)]
        return output

    def check(self) -> None:
        for config, name in ((self.config, "downsample_mode"), (self.config.vision_config, "patch_size")):
            if (expected := getattr(config, name)) != (found := getattr(self.processor, name)):
                raise ValueError(
                    f"{name} is {expected!r} by config.json and {found!r} by preprocessor_config.json"
                )
        super().check()
