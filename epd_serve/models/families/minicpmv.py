"""MiniCPM-V 4.6: a numbered picture or video and slices, before Qwen3.5's language model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from epd_serve.models.families.qwen3_5 import Qwen35Text
from epd_serve.models.family import PATCH_TOWER, Family, Size, TowerInputs, names
from epd_serve.protocol.wire import MediaRef

if TYPE_CHECKING:
    from epd_serve.models.video_processor import VideoProcessor


class MiniCPMV(Family):
    """The whole picture behind its number, and rows of slices of it; a video's frames are such pictures behind one
    number."""

    title = "MiniCPM-V 4.6"
    model_types = ("minicpmv4_6",)
    decoder = "generic"
    texts: ClassVar = {"qwen3_5_text": Qwen35Text.texts["qwen3_5_text"]}
    fields = names(
        "insert_layer_id image_size drop_vision_last_layer image_token_id video_token_id tie_word_embeddings",
        "downsample_mode patch_size",
    )
    towers: ClassVar = {"minicpmv4_6_vision": PATCH_TOWER | {"insert_layer_id"}}
    modalities = ("image", "video")
    input_names = ("pixel_values", "target_sizes")
    joins = False  # the slices of a picture lie side by side
    tokens = ("<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>")

    def __init__(self, config: Any, image_processor: Any) -> None:
        super().__init__(config, image_processor)
        patch = config.vision_config.patch_size
        self.picture_fields = {"downsample_mode": config.downsample_mode, "patch_size": patch}
        if image_processor.use_image_id:
            self.text_before = "<image_id>{}</image_id>"

    def read_video(self, settings: Mapping[str, Any]) -> VideoProcessor:
        from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil

        from epd_serve.models.video_processor import sliced_video

        return sliced_video(settings, MiniCPMV4_6ImageProcessorPil, _slices)

    def parts(self, size: Size) -> Sequence[int | str]:
        return self._parts(self.processor, size)

    def video_parts(self, item: MediaRef) -> Sequence[int | str]:
        num_frames = len(self._video_processor(item).indices(item))
        return [*self._parts(self._of_frames, (item.width, item.height))] * num_frames

    @property
    def _of_frames(self) -> Any:
        """The processor of a video's frames."""
        from epd_serve.models.video_processor import SlicedProcessor

        assert isinstance(self.video, SlicedProcessor)
        return self.video.pictures

    def _parts(self, processor: Any, size: Size) -> Sequence[int | str]:
        whole, one, (rows, columns) = _slices(processor, size)
        side = processor.patch_size * (2 if processor.downsample_mode == "4x" else 4)
        num_tokens, num_of_slice = (math.prod(shape) // side**2 for shape in (whole, one))
        parts: list[int | str] = ["<image>", num_tokens, "</image>"]
        for row in range(rows):
            parts += ["\n"] * bool(row) + ["<slice>", num_of_slice, "</slice>"] * columns
        return parts

    def num_pixels(self, size: Size) -> int:
        whole, one, grid = _slices(self.processor, size)
        return math.prod(whole) + math.prod(grid) * math.prod(one)

    @staticmethod
    def features(model: Any, inputs: TowerInputs) -> Any:
        import torch

        output = Family.features(model, inputs)
        output.pooler_output = [torch.cat(output.pooler_output)]
        return output

    def check_pictures(self) -> None:
        for name, expected in self.picture_fields.items() if self.video is not None else ():
            if (found := getattr(self._of_frames, name)) != expected:
                raise ValueError(f"{name} is {expected!r} by config.json and {found!r} of videos")
        super().check_pictures()


def _slices(processor: Any, size: Size) -> tuple[Size, Size, Size]:
    """Height and width of the whole picture and of a slice; rows and columns of slices."""
    shape, grid = (size[1], size[0]), None
    if processor.slice_mode:
        grid = processor.get_sliced_grid(shape, processor.max_slice_nums, processor.scale_resolution)
    options = (processor.scale_resolution, processor.patch_size, processor.downsample_mode)
    whole = processor.find_best_resize(shape, *options, allow_upscale=grid is None)
    if grid is None:
        return whole, (0, 0), (0, 0)
    rows, columns = grid
    height, width = processor.get_refine_size(shape, grid, *options, allow_upscale=True)
    return whole, (height // rows, width // columns), (rows, columns)
