"""Short videos for tests, made by PyAV."""

from __future__ import annotations

import base64
import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from epd_serve.media.video import VideoLimits

LIMITS = VideoLimits(max_pixels=1 << 22, max_bytes=8 << 20, max_frames=2000, max_seconds=120.0)


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
        if not isinstance(self.data, bytes):
            return np.stack([np.asarray(Image.open(io.BytesIO(one))) for one in self.data]), 1.0
        with av.open(io.BytesIO(self.data)) as file:
            rate = float(file.streams.video[0].average_rate or 0)
            return np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]), rate


def moving(seed: int, count: int, size: tuple[int, int] = (64, 48)) -> NDArray[np.uint8]:
    """Frames [count, height, width, 3] of coarse noise that moves: no two are alike."""
    width, height = size
    rng = np.random.default_rng(seed)
    tiles = rng.integers(0, 256, (-(-height // 8), -(-width // 8), 3), dtype=np.uint8)
    image = tiles.repeat(8, 0).repeat(8, 1)[:height, :width]
    return np.stack([np.roll(image, (5 * index, 3 * index), (1, 0)) for index in range(count)])


@contextmanager
def _own_priority() -> Iterator[None]:
    """SVT-AV1 gives the thread of a root user that calls it real-time priority, before all other processes."""
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, parameters)


@_own_priority()
def clip(
    seed: int = 0,
    count: int = 12,
    size: tuple[int, int] = (64, 48),
    *,
    fps: int = 4,
    codec: str = "libx264",
    container: str = "mp4",
    rotation: int = 0,
    **options: str,
) -> bytes:
    """A video file. ``options`` are the codec's."""
    muxing = {"movflags": "faststart"} if container == "mp4" else {}
    with (
        tempfile.TemporaryDirectory() as folder,  # a header is written anew at the end
        av.open(str(Path(folder) / "clip"), "w", format=container, options=muxing) as out,
    ):
        stream: Any = out.add_stream(codec, rate=fps, options=options)
        stream.width, stream.height = size
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.codec_context.thread_count = 1
        if rotation:
            stream.set_display_rotation(rotation)
        for frame in moving(seed, count, size):
            out.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        out.mux(stream.encode())
        out.close()
        return (Path(folder) / "clip").read_bytes()


def wide() -> bytes:
    """A frame of 10,000 × 10,000 pixels of one colour in a file of a few hundred kilobytes."""
    file = io.BytesIO()
    with av.open(file, "w", format="avi") as out:
        stream: Any = out.add_stream("mjpeg", rate=1)
        stream.width = stream.height = 10_000
        stream.pix_fmt = "yuvj420p"
        out.mux(stream.encode(av.VideoFrame(10_000, 10_000, "yuvj420p")))
        out.mux(stream.encode())
    return file.getvalue()
