"""A checkpoint's video processor: which frames it takes, to which size, and the tower's inputs.

transformers' own classes want torchvision, whose wheels do not load beside every torch. What they compute is here
in torch's own operators, with the same results to the bit: a resize of uint8 frames, one subtraction and one
division, and a permutation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as frame_resize
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as volume_resize

from epd_serve.errors import InvalidRequest
from epd_serve.models.family import TowerInputs, names
from epd_serve.protocol.wire import MediaRef

#: Fields of a video processor's file that change nothing, or nothing here.
_SILENT = names(
    "video_processor_type image_processor_type processor_class data_format input_data_format return_metadata",
    "return_tensors device default_to_square do_convert_rgb do_sample_frames video_metadata model_input_names",
    "min_pixels max_pixels max_image_size max_duration do_pad pad_size do_center_crop crop_size",
    "use_token_compression auto_map image_seq_length",
    # of a feature extractor, where one file is for pictures, videos and sounds
    "feature_extractor_type chunk_length dither feature_size hop_length n_fft n_samples nb_max_frames",
    "padding_side padding_value return_attention_mask sampling_rate",
)
_BICUBIC = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoSettings:
    """The fields of a video processor's file.

    Attributes:
        size: shortest_edge and longest_edge, which are numbers of pixels.
        fps, num_frames: frames that are sampled, where the request does not say.
        cap_pixels_per_frame, max_video_tokens: the bound of a whole video.
    """

    patch_size: int
    size: Mapping[str, int]
    max_video_tokens: int
    image_mean: Sequence[float]
    image_std: Sequence[float]
    temporal_patch_size: int = 2
    merge_size: int = 2
    min_frames: int = 4
    max_frames: int = 768
    fps: float | None = 2.0
    num_frames: int | None = None
    rescale_factor: float = 1 / 255
    cap_pixels_per_frame: bool | None = None

    @classmethod
    def read(cls, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> VideoSettings:
        """Raises ValueError for a field that is not honoured."""
        values = dict(defaults)
        known = {field.name for field in fields(cls)}
        for name, value in given.items():
            if name in ("do_resize", "do_rescale", "do_normalize"):
                if value is False:
                    raise ValueError(f"the video processor has {name}: false, which is not supported")
            elif name == "resample":
                if value != _BICUBIC:
                    raise ValueError(f"the video processor has resample: {value}; only bicubic (3) is supported")
            elif name in known:
                values[name] = values.get(name) if value is None else value
            elif name not in _SILENT:
                raise ValueError(f"the video processor has {name}: {value!r}, which is not known")
        return cls(**values)

    @property
    def mean_and_std(self) -> tuple[Tensor, Tensor]:
        """Mean and deviation of the three colours, for pixels from 0 to 255."""
        mean, std = (torch.tensor(list(numbers)) for numbers in (self.image_mean, self.image_std))
        return mean * (1.0 / self.rescale_factor), std * (1.0 / self.rescale_factor)


@dataclass(frozen=True, slots=True)
class VideoProcessor:
    """Samples, resizes and cuts videos.

    Attributes:
        sample: the numbers of the frames that are taken of so many at a rate, for a number of frames or a rate
            that is asked for.
        resize: height and width for a number of frames, and their height and width.
    """

    settings: VideoSettings
    sample: Callable[[VideoSettings, int, float, int | None, float | None], Sequence[int]]
    resize: Callable[[VideoSettings, int, int, int], tuple[int, int]]

    def indices(self, item: MediaRef) -> list[int]:
        """The numbers of the frames that are taken; of a segment, those in its patches in time.

        Raises InvalidRequest for a video that is too short.
        """
        found, step = self._sampled(item), self.settings.temporal_patch_size
        part = item.part_of(-(-len(found) // step))
        return found[step * part.start : step * part.stop]

    def _sampled(self, item: MediaRef) -> list[int]:
        """Those of the whole video."""
        video, asked = item.video, item.sampling
        count = asked.count_read(video)
        if video.is_list:
            found: Sequence[int] = range(count)
        elif count < video.num_frames:
            found = np.linspace(0, video.num_frames - 1, count, dtype=int).tolist()
        else:
            num_frames, fps = asked.processor_num_frames, asked.processor_fps
            if num_frames is None and fps is None:
                num_frames, fps = self.settings.num_frames, self.settings.fps
                fps = None if num_frames is not None else fps
            try:
                found = self.sample(self.settings, video.num_frames, video.fps, num_frames, fps)
            except ZeroDivisionError:  # transformers': fewer frames are asked for than a patch has
                found = ()
            except (ValueError, RuntimeError) as error:
                raise InvalidRequest(f"frames of the video cannot be sampled: {error}") from error
        if len(found) < self.settings.temporal_patch_size:
            raise InvalidRequest(
                f"{len(found)} of the video's {video.num_frames} frames would be encoded; the model needs at "
                f"least {self.settings.temporal_patch_size}"
            )
        return list(found)

    def frame_size(self, item: MediaRef) -> tuple[int, int]:
        """Height and width to which frames are resized. Raises InvalidRequest."""
        num_frames = len(self._sampled(item))
        try:
            return self.resize(self.settings, num_frames, item.height, item.width)
        except ValueError as error:
            raise InvalidRequest(
                f"a video of {num_frames} frames of {item.width}x{item.height} pixels cannot be used: {error}"
            ) from error

    def grid(self, item: MediaRef) -> tuple[int, int, int]:
        """Patches before merging: (frames, rows, columns)."""
        settings = self.settings
        height, width = self.frame_size(item)
        frames = -(-len(self.indices(item)) // settings.temporal_patch_size)
        return frames, height // settings.patch_size, width // settings.patch_size

    def num_tokens(self, item: MediaRef) -> int:
        """Rows of the feature."""
        return math.prod(self.grid(item)) // self.settings.merge_size**2

    def num_pixels(self, item: MediaRef) -> int:
        """Pixels that the tower sees, of one frame for each patch in time."""
        return math.prod(self.grid(item)) * self.settings.patch_size**2

    def seconds_per_patch(self, item: MediaRef) -> float:
        """Seconds from one row of patches in time to the next (``second_per_grid_ts``)."""
        sampled_fps = len(self.indices(item)) / item.num_frames * item.fps
        return self.settings.temporal_patch_size / sampled_fps

    def timestamps(self, item: MediaRef) -> list[float]:
        """Seconds of each row of patches in time: the mean of its first and last frame's."""
        step, indices = self.settings.temporal_patch_size, self.indices(item)
        indices += [indices[-1]] * (-len(indices) % step)
        times = [index / item.fps for index in indices]
        return [(times[start] + times[start + step - 1]) / 2 for start in range(0, len(times), step)]

    def inputs(self, item: MediaRef) -> VideoInputs:
        return VideoInputs(self.settings, self.frame_size(item), self.grid(item))


class VideoInputs:
    """Tower inputs of one video, made of frames as they come: no more than a few are kept in their own size."""

    def __init__(self, settings: VideoSettings, size: tuple[int, int], grid: tuple[int, int, int]) -> None:
        self._settings = settings
        self._grid = grid
        self._size = size
        self._frames = torch.empty(grid[0] * settings.temporal_patch_size, 3, *size, dtype=torch.uint8)
        self._count = 0

    def add(self, frames: NDArray[np.uint8]) -> None:
        """The next frames, RGB [n, height, width, 3]."""
        end = self._count + len(frames)
        assert end <= len(self._frames), "more frames than were asked for"
        self._frames[self._count : end] = resized(torch.from_numpy(frames).permute(0, 3, 1, 2), self._size)
        self._count = end

    def finish(self) -> TowerInputs:
        """Once all frames are there; the last stands for those that fill the last patch."""
        settings, (frames, rows, columns) = self._settings, self._grid
        assert len(self._frames) - self._count < settings.temporal_patch_size, "frames are missing"
        self._frames[self._count :] = self._frames[self._count - 1]
        patch, merge = settings.patch_size, settings.merge_size
        patches = self._frames.view(
            frames,
            settings.temporal_patch_size,
            3,
            rows // merge,
            merge,
            patch,
            columns // merge,
            merge,
            patch,
        ).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
        values = patches.reshape(frames * rows * columns, 3, -1).to(torch.float32)
        mean, std = (numbers.view(-1, 1) for numbers in settings.mean_and_std)
        values = values.sub_(mean).div_(std).flatten(1)
        return {"pixel_values": values, "image_grid_thw": torch.tensor([self._grid])}


class FrameProcessor(VideoProcessor):
    """Videos whose frames are pictures by themselves; a patch in time is a frame."""

    __slots__ = ()

    def inputs(self, item: MediaRef) -> VideoInputs:
        return FrameInputs(self.settings, self.frame_size(item), self.grid(item))


class FrameInputs(VideoInputs):
    """Patches row by row [frames, patches, values], and the column and row of each."""

    def finish(self) -> TowerInputs:
        settings, (frames, rows, columns) = self._settings, self._grid
        assert self._count == len(self._frames), "frames are missing"
        patch = settings.patch_size
        patches = self._frames.view(frames, 3, rows, patch, columns, patch).permute(0, 2, 4, 3, 5, 1)
        mean, std = settings.mean_and_std
        values = patches.to(torch.float32).sub_(mean).div_(std).reshape(frames, rows * columns, -1)
        places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1)
        return {"pixel_values": values, "image_position_ids": places.repeat(frames, 1, 1)}


def resized(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """uint8 [n, 3, height, width] of another height and width."""
    if pixels.shape[2:] == size:
        return pixels
    return F.interpolate(pixels.contiguous(), size, mode="bicubic", antialias=True)


def frames_from_the_first(
    settings: VideoSettings, total: int, rate: float, count: int | None, fps: float | None
) -> list[int]:
    """Frames of transformers' own sampling: evenly from the first on."""
    if fps is not None and settings.num_frames is not None:
        raise ValueError("the model takes a number of frames; ask for num_frames, not for fps")
    if count is None:
        assert fps is not None, "a rate or a number"
        count = max(1, int(total / rate * fps))
    if count > total:
        raise ValueError(f"it has {total} frames, fewer than the {count} to be taken")
    return [number * total // count for number in range(count)]


def frames_at_rate(
    settings: VideoSettings, total: int, rate: float, count: int | None, fps: float | None
) -> list[int]:
    """Frames of Qwen2-VL and Qwen2.5-VL: whole patches in time, evenly from the first on."""
    step = settings.temporal_patch_size
    if count is not None:
        count = round(count / step) * step
    else:
        assert fps is not None, "a rate or a number"
        most = math.floor(min(settings.max_frames, total) / step) * step
        count = math.floor(min(max(total / rate * fps, settings.min_frames), most, total) / step) * step
    if count > total:
        raise ValueError(f"it has {total} frames, fewer than the {count} to be taken")
    found: list[int] = torch.arange(0, total, total / count).int().tolist()
    return found


def frames_to_last(
    settings: VideoSettings, total: int, rate: float, count: int | None, fps: float | None
) -> list[int]:
    """Frames of Qwen3-VL: evenly from the first to the last."""
    if count is None:
        assert fps is not None, "a rate or a number"
        count = min(max(int(total / rate * fps), settings.min_frames), settings.max_frames, total)
    found: list[int] = np.linspace(0, total - 1, count).round().astype(int).tolist()
    return found


def resize_by_frame(settings: VideoSettings, num_frames: int, height: int, width: int) -> tuple[int, int]:
    """Sizes of Qwen2-VL and Qwen2.5-VL: bounds for each frame."""
    factor, least, most = settings.patch_size * settings.merge_size, *_bounds(settings)
    if settings.cap_pixels_per_frame:
        whole = int(settings.max_video_tokens * factor * factor * 0.9)
        most = max(min(most, whole * settings.temporal_patch_size // num_frames), int(least * 1.05))
    size: tuple[int, int] = frame_resize(height, width, factor=factor, min_pixels=least, max_pixels=most)
    return size


def resize_by_video(settings: VideoSettings, num_frames: int, height: int, width: int) -> tuple[int, int]:
    """Sizes of Qwen3-VL: bounds for all frames together."""
    factor, least, most = settings.patch_size * settings.merge_size, *_bounds(settings)
    if settings.cap_pixels_per_frame:
        of_frame = min(settings.max_video_tokens * factor * factor, most // num_frames)
        most = max(of_frame, int(least * 1.05)) * num_frames
    size: tuple[int, int] = volume_resize(
        num_frames=num_frames,
        height=height,
        width=width,
        temporal_factor=settings.temporal_patch_size,
        factor=factor,
        min_pixels=least,
        max_pixels=most,
    )
    return size


def _bounds(settings: VideoSettings) -> tuple[int, int]:
    return settings.size["shortest_edge"], settings.size["longest_edge"]


_CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
_HALVES = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
#: What transformers' classes have where a checkpoint's file says nothing.
_QWEN2: dict[str, Any] = {
    "patch_size": 14,
    "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28},
    "max_video_tokens": 128_000,
    **_CLIP,
}
_QWEN3: dict[str, Any] = {
    "patch_size": 16,
    "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32},
    "max_video_tokens": 768,
    **_HALVES,
}


def qwen2_video(given: Mapping[str, Any]) -> VideoProcessor:
    """``Qwen2VLVideoProcessor``. Raises ValueError as :meth:`VideoSettings.read`."""
    size = dict(given.get("size") or _QWEN2["size"])
    for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        size[edge] = given.get(name) or size[edge]
    return VideoProcessor(VideoSettings.read({**given, "size": size}, _QWEN2), frames_at_rate, resize_by_frame)


def gemma4_video(
    given: Mapping[str, Any], fit: Callable[..., tuple[int, int]], *, merged: bool = False
) -> VideoProcessor:
    """``Gemma4VideoProcessor``. Raises ValueError as :meth:`VideoSettings.read`.

    Args:
        fit: ``get_aspect_ratio_preserving_size`` of its image processor's module.
        merged: a patch is as large as a token.
    """
    fields = dict(given)
    most, kernel = (
        fields.pop(name, None) or usual for name, usual in (("max_soft_tokens", 70), ("pooling_kernel_size", 3))
    )

    def resize(settings: VideoSettings, num_frames: int, height: int, width: int) -> tuple[int, int]:
        return fit(height, width, patch, most * kernel**2, kernel)

    usual = {"patch_size": 16, "size": {}, "image_mean": [0.0] * 3, "image_std": [1.0] * 3, "num_frames": 32}
    bounds = {"max_video_tokens": most, "merge_size": kernel, "temporal_patch_size": 1, "fps": None}
    settings = VideoSettings.read(fields, {**usual, **bounds})
    patch = settings.patch_size
    if merged:
        settings = replace(settings, patch_size=patch * kernel, merge_size=1)
    return FrameProcessor(settings, frames_from_the_first, resize)


def qwen3_video(given: Mapping[str, Any]) -> VideoProcessor:
    """``Qwen3VLVideoProcessor``. Raises ValueError as :meth:`VideoSettings.read`."""
    return VideoProcessor(VideoSettings.read(given, _QWEN3), frames_to_last, resize_by_video)
