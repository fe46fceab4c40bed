"""A checkpoint's video processor: sampled frames, their size, and the tower's inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchvision.transforms.v2 import functional as tvF
from transformers.video_utils import VideoMetadata

from epd_serve.errors import InvalidRequest
from epd_serve.models.family import TowerInputs
from epd_serve.protocol.wire import MediaRef

#: Default sampling rate in frames per second.
_USUAL_FPS = 2.0


@dataclass(frozen=True, slots=True)
class VideoProcessor:
    """Computes the layout and tower inputs of videos as transformers' ``processor`` does, from metadata alone."""

    processor: Any

    @property
    def frames_per_patch(self) -> int:
        frames: int = self.processor.temporal_patch_size
        return frames

    @property
    def merge(self) -> int:
        """Side of the square of patches merged into one token."""
        merge: int = self.processor.merge_size
        return merge

    def indices(self, item: MediaRef) -> list[int]:
        """Return the indices of the sampled frames, for a segment only those of its temporal patches.

        Raises InvalidRequest if the video is too short.
        """
        found, step = self._sampled(item), self.frames_per_patch
        part = item.part_of(-(-len(found) // step))
        return found[step * part.start : step * part.stop]

    def _sampled(self, item: MediaRef) -> list[int]:
        """Return the indices of the sampled frames of the whole video."""
        video, asked = item.video, item.sampling
        count = asked.count_read(video)
        if video.is_list:
            found: Sequence[int] = range(count)
        elif asked.takes_all_read(video):
            found = np.linspace(0, video.num_frames - 1, count, dtype=int).tolist()
        else:
            num_frames, fps = asked.processor_num_frames, asked.processor_fps
            if num_frames is None:
                num_frames = self.processor.num_frames
                fps = fps or (None if num_frames else self.processor.fps or _USUAL_FPS)
            metadata = VideoMetadata(total_num_frames=video.num_frames, fps=video.fps)
            try:
                found = self.processor.sample_frames(metadata, num_frames=num_frames, fps=fps).tolist()
                if asked.max_frames is not None and len(found) > asked.max_frames:
                    most = asked.max_frames - asked.max_frames % self.frames_per_patch
                    found = self.processor.sample_frames(metadata, num_frames=most, fps=None).tolist()
            except ZeroDivisionError:  # raised by transformers for fewer frames than a patch has
                found = ()
            except (ValueError, RuntimeError) as error:
                raise InvalidRequest(f"frames of the video cannot be sampled: {error}") from error
        if len(found) < self.frames_per_patch:
            raise InvalidRequest(
                f"{len(found)} of the video's {video.num_frames} frames would be encoded; the model needs at "
                f"least {self.frames_per_patch}"
            )
        return list(found)

    def frame_size(self, item: MediaRef) -> tuple[int, int]:
        """Return height and width of resized frames. Raises InvalidRequest."""
        num_frames = len(self._sampled(item))
        try:
            return _frame_size(self, num_frames, item.height, item.width)
        except ValueError as error:
            raise InvalidRequest(
                f"a video of {num_frames} frames of {item.width}x{item.height} pixels cannot be used: {error}"
            ) from error

    def resized(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        """Return the height and width of frames resized by transformers, found with a tensor without data."""
        frames = torch.empty(1, num_frames, 3, height, width, dtype=torch.uint8, device="meta")
        resized = self.processor.resize(
            frames,
            size=self.processor.size,
            resample=self.processor.resample,
            factor=self.processor.patch_size * self.merge,
            temporal_factor=self.frames_per_patch,
            cap_pixels_per_frame=self.processor.cap_pixels_per_frame,
        )
        return resized.shape[-2], resized.shape[-1]

    def grid(self, item: MediaRef) -> tuple[int, int, int]:
        """Return the patches before merging: (frames, rows, columns)."""
        height, width = self.frame_size(item)
        frames, side = -(-len(self.indices(item)) // self.frames_per_patch), self.processor.patch_size
        return frames, height // side, width // side

    def num_tokens(self, item: MediaRef) -> int:
        """Return the rows of the feature."""
        return math.prod(self.grid(item)) // self.merge**2

    def num_pixels(self, item: MediaRef) -> int:
        """Return the pixels for the tower, counting one frame per temporal patch."""
        side: int = self.processor.patch_size
        return math.prod(self.grid(item)) * side**2

    def seconds_per_patch(self, item: MediaRef) -> float:
        """Return the seconds between consecutive temporal patches (``second_per_grid_ts``)."""
        sampled_fps = len(self.indices(item)) / item.num_frames * item.fps
        return self.frames_per_patch / sampled_fps

    def timestamps(self, item: MediaRef) -> list[float]:
        """Return the timestamp of each temporal patch: the mean of its first and last frame's."""
        step, indices = self.frames_per_patch, self.indices(item)
        indices += [indices[-1]] * (-len(indices) % step)
        times = [index / item.fps for index in indices]
        return [(times[start] + times[start + step - 1]) / 2 for start in range(0, len(times), step)]

    def inputs(self, item: MediaRef) -> VideoInputs:
        return VideoInputs(self, len(self.indices(item)), self.frame_size(item))

    def prepared(self, frames: torch.Tensor) -> TowerInputs:
        """Return the tower's inputs for resized frames, uint8 [n, 3, height, width]."""
        made = self._processed(frames)
        return {"pixel_values": made["pixel_values_videos"], "image_grid_thw": made["video_grid_thw"]}

    def _processed(self, frames: torch.Tensor) -> Any:
        return self.processor(
            videos=[frames],
            do_resize=False,
            do_sample_frames=False,
            input_data_format="channels_first",
            return_tensors="pt",
        )


@lru_cache(maxsize=256)
def _frame_size(processor: VideoProcessor, num_frames: int, height: int, width: int) -> tuple[int, int]:
    """Cache :meth:`VideoProcessor.resized`, which takes milliseconds."""
    return processor.resized(num_frames, height, width)


class FrameProcessor(VideoProcessor):
    """Gemma 4's video processor: frames are separate images, so a temporal patch is a frame."""

    __slots__ = ()
    frames_per_patch = 1

    @property
    def merge(self) -> int:
        merge: int = self.processor.pooling_kernel_size
        return merge

    def resized(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        processor = self.processor
        frames = torch.empty(num_frames, 3, height, width, dtype=torch.uint8, device="meta")
        resized = processor.aspect_ratio_preserving_resize(
            frames,
            patch_size=processor.patch_size,
            max_patches=processor.max_soft_tokens * self.merge**2,
            pooling_kernel_size=self.merge,
            resample=processor.resample,
        )
        return resized.shape[-2], resized.shape[-1]

    def prepared(self, frames: torch.Tensor) -> TowerInputs:
        """Return patches [frames, patches, values], and the column and row of each, without padding."""
        made = self._processed(frames)
        is_patch = (made["video_position_ids"][0] >= 0).all(-1)
        values, places = made["pixel_values_videos"], made["video_position_ids"]
        return {"pixel_values": values[:, is_patch], "image_position_ids": places[:, is_patch]}


class VideoInputs:
    """Tower inputs of one video, built from frames as they arrive, with few frames kept at full size."""

    def __init__(self, processor: VideoProcessor, count: int, size: tuple[int, int]) -> None:
        self._processor = processor
        self._frames = torch.empty(count, 3, *size, dtype=torch.uint8)
        self._count = 0

    def add(self, frames: NDArray[np.uint8]) -> None:
        """Add the next frames, RGB [n, height, width, 3]."""
        end = self._count + len(frames)
        assert end <= len(self._frames), "more frames than requested"
        pixels = torch.from_numpy(frames).permute(0, 3, 1, 2).contiguous()
        resample = int(self._processor.processor.resample)
        self._frames[self._count : end] = tvF.resize(pixels, list(self._frames.shape[2:]), resample)
        self._count = end

    def finish(self) -> TowerInputs:
        """Return the inputs after all frames were added."""
        assert self._count == len(self._frames), "frames are missing"
        return self._processor.prepared(self._frames)
