"""The video processors of Qwen2.5-VL and Qwen3-VL, written down plainly: a frame and a patch at a time.

transformers' own need torchvision. Where that is at hand, ``tests/models/test_video_processor.py`` holds these
against them.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from plain_torchvision import video_processor_of
from transformers.feature_extraction_utils import BatchFeature
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as volume_resize
from transformers.video_utils import VideoMetadata


@dataclass(frozen=True, eq=False)
class Clip:
    """A video's file, or the pictures of a frame list, one a second.

    Attributes:
        fps: what the processor is asked for. num_read: frames that are read of the file.
    """

    data: bytes | tuple[bytes, ...]
    fps: float | None = None
    num_read: int | None = None

    @property
    def is_list(self) -> bool:
        return isinstance(self.data, tuple)

    @property
    def url(self) -> str:
        if isinstance(self.data, bytes):
            return f"data:video/mp4;base64,{base64.b64encode(self.data).decode()}"
        return "data:video/jpeg;base64," + ",".join(base64.b64encode(one).decode() for one in self.data)

    def frames(self) -> tuple[NDArray[np.uint8], float]:
        """All frames [count, height, width, 3], and how many there are a second."""
        import av

        if not isinstance(self.data, bytes):
            return np.stack([np.asarray(Image.open(io.BytesIO(one))) for one in self.data]), 1.0
        with av.open(io.BytesIO(self.data)) as file:
            rate = float(file.streams.video[0].average_rate or 0)
            return np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]), rate


_DEFAULTS = {"video_processor_type": "Qwen2VLVideoProcessor", "fps": 2, "min_frames": 4, "max_frames": 768}


class PlainGemma4Videos:
    """Gemma 4's video processor: padded frames, one by one."""

    def __init__(self, path: Path, clips: Sequence[Clip]) -> None:
        self._settings = json.loads((path / "video_preprocessor_config.json").read_text())
        self._clips = clips

    def __call__(self, videos: Any, **_: Any) -> BatchFeature:
        most, pixels, places, counts, metadata = self._settings["max_soft_tokens"] * 9, [], [], [], []
        for clip in self._clips:
            frames, rate = clip.frames()
            total = len(frames)
            if clip.is_list:
                indices = list(range(total))
            elif clip.num_read is not None:
                indices = np.linspace(0, total - 1, clip.num_read, dtype=int).tolist()
            else:
                count = self._settings["num_frames"]
                assert count <= total
                indices = [int(total / count * number + 1e-9) for number in range(count)]
            height, width = get_aspect_ratio_preserving_size(*frames.shape[1:3], 16, most, 3)
            rows, columns = height // 16, width // 16
            for index in indices:
                resized = _resized(frames[index], (height, width)).float() / 255
                own = [
                    resized[:, 16 * y : 16 * y + 16, 16 * x : 16 * x + 16].permute(1, 2, 0).flatten()
                    for y in range(rows)
                    for x in range(columns)
                ]
                padding = most - len(own)
                pixels.append(F.pad(torch.stack(own), (0, 0, 0, padding)))
                places.append(
                    F.pad(
                        torch.tensor([[x, y] for y in range(rows) for x in range(columns)]),
                        (0, 0, 0, padding),
                        value=-1,
                    )
                )
            counts.append((len(indices), rows * columns // 9))
            metadata.append(VideoMetadata(total_num_frames=total, fps=rate, frames_indices=indices))
        return BatchFeature(
            {
                "pixel_values_videos": torch.stack(pixels),
                "video_position_ids": torch.stack(places),
                "num_frames_per_video": torch.tensor([count for count, _ in counts]),
                "num_soft_tokens_per_video": [count for _, count in counts],
                "video_metadata": metadata,
            }
        )


class PlainUnifiedVideos:
    """Gemma 4 12B's own video processor, with torch's operators in the place of torchvision's."""

    def __init__(self, path: Path, clips: Sequence[Clip]) -> None:
        self._processor, self._clips = video_processor_of(path, "gemma4_unified"), clips

    def __call__(self, videos: Any, **_: Any) -> BatchFeature:
        read, metadata = [], []
        for clip in self._clips:
            frames, rate = clip.frames()
            total, count = len(frames), self._processor.num_frames
            indices = [int(total / count * number + 1e-9) for number in range(count)]
            if clip.is_list:
                indices = list(range(total))
            elif clip.num_read is not None:
                indices = np.linspace(0, total - 1, clip.num_read, dtype=int).tolist()
            read.append(frames[indices])
            metadata.append(VideoMetadata(total_num_frames=total, fps=rate, frames_indices=indices))
        made: BatchFeature = self._processor(
            videos=read, video_metadata=metadata, do_sample_frames=False, return_tensors="pt"
        )
        made["video_metadata"] = metadata
        return made


class PlainVideoProcessor:
    """Stands in a processor of transformers in the place of its video processor, for these clips."""

    merge_size = temporal_patch_size = 2

    def __new__(cls, path: Path, clips: Sequence[Clip]) -> Any:
        others = {"gemma4": PlainGemma4Videos, "gemma4_unified": PlainUnifiedVideos}
        other = others.get(json.loads((path / "config.json").read_text())["model_type"])
        return super().__new__(cls) if other is None else other(path, clips)

    def __init__(self, path: Path, clips: Sequence[Clip]) -> None:
        file = path / "video_preprocessor_config.json"
        if not file.exists():  # one file for pictures and videos, as Qwen2-VL's processors had
            file = path / "preprocessor_config.json"
        self._settings = {**_DEFAULTS, **json.loads(file.read_text())}
        self._is_qwen3 = self._settings["video_processor_type"].startswith("Qwen3")
        self._clips = clips

    def __call__(self, videos: Any, *, size: dict[str, int] | None = None, **_: Any) -> BatchFeature:
        self._size = size or self._settings["size"]
        made = [self._one(clip) for clip in self._clips]
        return BatchFeature(
            {
                "pixel_values_videos": torch.cat([patches for patches, _, _ in made]),
                "video_grid_thw": torch.tensor([grid for _, grid, _ in made]),
                "video_metadata": [metadata for _, _, metadata in made],
            }
        )

    def _indices(self, clip: Clip, total: int, rate: float) -> list[int]:
        settings, wanted = self._settings, clip.fps or self._settings["fps"]
        if clip.is_list:
            return list(range(total))
        if clip.num_read is not None:
            return np.linspace(0, total - 1, clip.num_read, dtype=int).tolist()
        if self._is_qwen3:
            count = min(max(int(total / rate * wanted), settings["min_frames"]), settings["max_frames"], total)
            return np.linspace(0, total - 1, count).round().astype(int).tolist()
        most = min(settings["max_frames"], total) // 2 * 2
        count = int(min(max(total / rate * wanted, settings["min_frames"]), most) // 2 * 2)
        return [int(index * total / count) for index in range(count)]

    def _one(self, clip: Clip) -> tuple[torch.Tensor, tuple[int, int, int], VideoMetadata]:
        frames, rate = clip.frames()
        height, width = frames.shape[1:3]
        indices = self._indices(clip, len(frames), rate)
        least, most = self._size["shortest_edge"], self._size["longest_edge"]
        if self._is_qwen3:
            size = volume_resize(len(indices), height, width, 2, 28, least, most)
        else:
            size = smart_resize(height, width, factor=28, min_pixels=least, max_pixels=most)
        mean, std = (torch.tensor(self._settings[f"image_{name}"]).view(3, 1, 1) * 255 for name in ("mean", "std"))
        values = [(_resized(frames[index], size).float() - mean) / std for index in indices]
        values += values[-1:] * (len(values) % 2)
        grid = len(values) // 2, size[0] // 14, size[1] // 14
        patches = [
            torch.stack(
                [one[:, 14 * y : 14 * y + 14, 14 * x : 14 * x + 14] for one in values[2 * t : 2 * t + 2]], 1
            )
            for t in range(grid[0])
            for top in range(0, grid[1], 2)
            for left in range(0, grid[2], 2)
            for y in (top, top + 1)
            for x in (left, left + 1)
        ]
        metadata = VideoMetadata(total_num_frames=len(frames), fps=rate, frames_indices=indices)
        return torch.stack(patches).flatten(1), grid, metadata


def _resized(frame: NDArray[np.uint8], size: tuple[int, int]) -> torch.Tensor:
    pixels = torch.from_numpy(frame).permute(2, 0, 1)[None]
    if tuple(size) != tuple(pixels.shape[2:]):
        pixels = F.interpolate(pixels, size, mode="bicubic", antialias=True)
    return pixels[0]
