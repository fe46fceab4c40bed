"""Open video and audio files with PyAV (FFmpeg), from memory only.

The first bytes select one of a few accepted formats, so that FFmpeg never tries a demuxer that opens other files
or URLs.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from epd_serve.errors import InvalidRequest, TooLarge

What = Literal["video", "audio"]
#: Accepted containers by FFmpeg name, and how users call them.
_CONTAINERS: dict[What, tuple[tuple[str, ...], str]] = {
    "video": (("mov", "matroska", "avi", "mpegts"), "MP4, QuickTime, WebM, Matroska, AVI and MPEG-TS"),
    "audio": (("wav", "mp3", "flac", "ogg", "mov", "matroska"), "WAV, MP3, FLAC, Ogg, MP4 and WebM"),
}


def load_pyav(what: str) -> Any:
    """Import PyAV. Raises InvalidRequest that names the package to install for ``what``."""
    try:
        import av
        import av.logging
    except ImportError as error:
        raise InvalidRequest(
            f"{what} need PyAV, which is not installed; run in epd-serve's clone: pip install '.[media]'",
            code="unsupported_media",
        ) from error
    return av


def container_of(data: bytes, what: What, max_bytes: int) -> str:
    """Return FFmpeg's name of the container. Raises InvalidRequest, or TooLarge beyond ``max_bytes``."""
    if not data:
        raise InvalidRequest(f"the {what} is empty (0 bytes)")
    if len(data) > max_bytes:
        raise TooLarge(f"the {what} has {len(data)} bytes; at most {max_bytes} are accepted")
    head, kind = bytes(data[:12]), ""
    if head[:4] == b"RIFF":
        kind = {b"WAVE": "wav", b"AVI ": "avi"}.get(head[8:], "")
    elif head[:4] == b"fLaC":
        kind = "flac"
    elif head[:4] == b"OggS":
        kind = "ogg"
    elif head[4:8] in (b"ftyp", b"moov", b"mdat", b"free", b"wide", b"skip"):
        kind = "mov"
    elif head[:4] == b"\x1aE\xdf\xa3":
        kind = "matroska"
    elif head[:3] == b"ID3" or (head[:1] == b"\xff" and head[1:2] and head[1] & 0xE6 in (0xE2, 0xE4, 0xE6)):
        kind = "mp3"
    elif head[:3] == b"GIF" and what == "video":
        raise InvalidRequest(
            "the video is a GIF: send it as image_url to use its first frame, or convert it to MP4"
        )
    elif head[:1] == b"G" and data[188:189] in (b"G", b""):
        kind = "mpegts"
    accepted, names = _CONTAINERS[what]
    if kind not in accepted:
        found = "a readable video" if what == "video" else "readable audio"
        raise InvalidRequest(f"the data is not {found} (it starts with {head[:8]!r}); supported are {names}")
    return kind


@contextmanager
def opened(data: bytes, what: What, kind: str, codecs: Collection[str]) -> Iterator[tuple[Any, Any]]:
    """Open a container and its first stream of ``what``; convert FFmpeg's errors to InvalidRequest.

    Args:
        kind: container, of :func:`container_of`.
        codecs: accepted codecs by FFmpeg name; for audio also all of PCM ("pcm_...").
    """
    av, options = load_pyav("videos" if what == "video" else "sounds"), {"protocol_whitelist": "none"}
    try:
        with av.open(io.BytesIO(data), format=kind, options=options, metadata_errors="ignore") as file:
            streams = file.streams.video if what == "video" else file.streams.audio
            if not streams:
                raise InvalidRequest(f"the file contains no {what} stream, or is truncated before it")
            stream = streams[0]
            name = None if stream.codec_context is None else stream.codec_context.codec.canonical_name
            if name is None or not (name in codecs or (what == "audio" and name.startswith("pcm_"))):
                supported = ", ".join(["PCM", *sorted(codecs)] if what == "audio" else sorted(codecs))
                raise InvalidRequest(f"the {what}'s codec is {name or 'unknown'}; supported are {supported}")
            stream.codec_context.thread_count = 1  # limits apply per process, and other processes decode too
            yield file, stream
    except av.FFmpegError as error:
        raise InvalidRequest(f"the {what} is corrupt or truncated: {error.strerror}") from error
    except (ValueError, EOFError, OverflowError, ZeroDivisionError, UnicodeError) as error:
        raise InvalidRequest(f"the {what} is corrupt: {error}") from error
