"""Videos: read the facts of a container, and decode frames by number.

A frame list is a sequence of JPEG files (:func:`pack_frames`), as in vLLM, and does not need PyAV. All this runs
in the processes of :mod:`epd_serve.media.decoder`, because a file may crash its decoder or keep it busy forever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from epd_serve.errors import InvalidRequest, TooLarge
from epd_serve.media.container import container_of, opened
from epd_serve.media.picture import MediaLimits, open_image, pixel_size
from epd_serve.types import VideoFacts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: Accepted codecs, by FFmpeg name.
CODECS = frozenset(
    ("h264", "hevc", "av1", "vp8", "vp9", "mpeg4", "mpeg2video", "mpeg1video", "mjpeg", "theora", "prores")
)
#: Codecs in which a packet is a frame, and decoding can start at any key frame.
_SEEKABLE = frozenset(("h264", "hevc", "av1", "vp9", "mjpeg", "prores"))
#: Highest plausible frame rate, in frames per second.
_MAX_RATE = 1000.0
#: Limit on packets before the first frame.
_MAX_DELAY = 256


class VideoLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on a video: pixels of a frame (width × height), and bytes, frames and seconds of the file."""

    max_pixels: int
    max_bytes: int
    max_frames: int
    max_seconds: float


def pack_frames(frames: Sequence[bytes]) -> bytes:
    """Pack a frame list into one file."""
    return msgspec.msgpack.encode(list(frames))


def unpack_frames(data: bytes) -> list[bytes]:
    return msgspec.msgpack.decode(data, type=list[bytes])


def read_facts(data: bytes, limits: VideoLimits) -> VideoFacts:
    """Return the facts of a file, by reading its headers, counting its packets and decoding its first frame.

    Raises InvalidRequest if the file is not a video, is corrupt or exceeds a limit; TooLarge if it has too many
    bytes.
    """
    with opened(data, "video", container_of(data, "video", limits.max_bytes), CODECS) as (file, stream):
        _check_size(stream.codec_context.width, stream.codec_context.height, limits.max_pixels)
        num_frames, first = 0, None
        for packet in file.demux(stream):
            if packet.is_corrupt:
                raise InvalidRequest(f"the video is corrupt or truncated after {num_frames} frames")
            if first is None:
                first = next(iter(packet.decode()), None)
                if first is None and num_frames > _MAX_DELAY:
                    raise InvalidRequest("the video is corrupt: its first packets contain no frame")
            num_frames += packet.size > 0 and not packet.is_discard
            if num_frames > limits.max_frames:
                raise _beyond(f"more than {limits.max_frames} frames", "shorten it")
        if first is None:
            raise InvalidRequest("the video contains no frame")
        fps = float(stream.average_rate or stream.guessed_rate or 0)
        if not 0 < fps <= _MAX_RATE:
            raise InvalidRequest(f"the video has {fps:g} frames per second; at most {_MAX_RATE:g} are accepted")
        width, height = _displayed(first)
        _check_size(width, height, limits.max_pixels)
    facts = VideoFacts(width, height, num_frames, fps)
    if facts.duration_s > limits.max_seconds:
        raise _beyond(f"{facts.duration_s:.0f} s; at most {limits.max_seconds:g} s are accepted", "shorten it")
    return facts


def read_list(frames: Sequence[bytes], fps: float, limits: VideoLimits) -> VideoFacts:
    """Return the facts of a frame list. Raises like :func:`read_facts`, naming the wrong frame."""
    if len(frames) > limits.max_frames:
        raise _beyond(f"{len(frames)} frames; at most {limits.max_frames} are accepted", "send fewer")
    total = sum(map(len, frames))
    if total > limits.max_bytes:
        raise TooLarge(f"the frames have {total} bytes together; at most {limits.max_bytes} are accepted")
    size: tuple[int, int] | None = None
    for number, frame in enumerate(frames):
        try:
            found = pixel_size(frame, MediaLimits(max_pixels=limits.max_pixels, max_bytes=limits.max_bytes))
        except InvalidRequest as error:
            raise InvalidRequest(f"frame {number} of the video: {error.message}", code=error.code) from error
        if size is not None and found != size:
            raise InvalidRequest(
                f"frame {number} of the video has {found[0]}x{found[1]} pixels but frame 0 has "
                f"{size[0]}x{size[1]}: all frames must have the same size"
            )
        size = found
    assert size is not None, "frame lists are not empty"
    facts = VideoFacts(*size, len(frames), fps, is_list=True)
    if facts.duration_s > limits.max_seconds:
        raise _beyond(
            f"{facts.duration_s:.0f} s; at most {limits.max_seconds:g} s are accepted", "send fewer frames"
        )
    return facts


def read_frames(data: bytes, facts: VideoFacts, indices: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
    """Yield the frames ``indices``, in ascending order with repeats allowed, as RGB [height, width, 3].

    Raises InvalidRequest if the file is corrupt or does not match its facts.
    """
    import numpy as np  # not installed at the gateway, which decodes no frames

    if facts.is_list:
        frames = unpack_frames(data)
        limits = MediaLimits(max_pixels=facts.width * facts.height, max_bytes=len(data))
        for index in indices:
            image = open_image(frames[index], limits)
            if image.size != (facts.width, facts.height):
                raise InvalidRequest(f"frame {index} of the video has {image.size} pixels, unlike its header")
            yield np.asarray(image)
        return
    wanted = iter(indices)
    next_one = next(wanted, None)
    number = -1
    for is_sought in (True, False) if next_one else (False,):
        for number, frame in _decoded(data, facts, next_one if is_sought else None):
            if number != next_one:
                continue
            if frame.is_corrupt:
                raise InvalidRequest(f"frame {number} of the video is corrupt")
            if _displayed(frame) != (facts.width, facts.height):
                raise InvalidRequest(
                    f"frame {number} of the video has {_displayed(frame)} pixels but its first frame "
                    f"{(facts.width, facts.height)}: all frames must have the same size"
                )
            pixels = np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90) % 4)
            while number == next_one:
                yield pixels
                next_one = next(wanted, None)
            if next_one is None:
                return
    raise InvalidRequest(f"the video ends after {number + 1} frames but its container lists {facts.num_frames}")


def _decoded(data: bytes, facts: VideoFacts, first: int | None) -> Iterator[tuple[int, Any]]:
    """Yield the frames of a file with their numbers.

    With ``first``, seek to the last key frame at or before it, and stop when the container's timestamps and the
    decoder disagree on the numbers. Yield nothing if the file does not allow seeking.
    """
    kind = container_of(data, "video", len(data))
    with opened(data, "video", kind, CODECS) as (file, stream):
        if first is None:
            yield from enumerate(file.decode(stream))
            return
        if stream.codec_context.codec.canonical_name not in _SEEKABLE or kind not in ("mov", "matroska"):
            return
        packets = (one for one in file.demux(stream) if one.size > 0 and not one.is_discard)
        is_key = {one.pts: one.is_keyframe for one in packets if one.pts is not None}
        times = sorted(is_key)
        if not first < len(times) == facts.num_frames or not is_key[times[0]]:
            return
        start = next(number for number in range(first, -1, -1) if is_key[times[number]])
        file.seek(times[start], stream=stream)
        numbers = {time: number for number, time in enumerate(times)}
        for frame in file.decode(stream):
            number = numbers.get(frame.pts, -1)
            if number > start or number == -1:
                return
            if number == start:
                yield number, frame
                start += 1


def _displayed(frame: Any) -> tuple[int, int]:
    """Return the displayed width and height of a frame, applying its rotation."""
    is_turned = round(frame.rotation / 90) % 2
    return (frame.height, frame.width) if is_turned else (frame.width, frame.height)


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise _beyond(
            f"frames of {width}×{height} = {width * height} pixels; at most {max_pixels} are accepted",
            "scale it down",
        )


def _beyond(found: str, remedy: str) -> InvalidRequest:
    return InvalidRequest(f"the video has {found}: {remedy}", code="video_too_large")
