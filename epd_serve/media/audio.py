"""Sounds before any tensor: facts of a file, all of which is decoded, and its samples at a model's rate.

PyAV (FFmpeg) reads a file from memory alone: its format is told from its first bytes and is one of a few. It is
decoded to its end for its facts: no header of a compressed file says how many samples come out, and a prompt's
tokens follow from them. All this runs in the processes of :mod:`epd_serve.media.decoder`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from epd_serve.errors import InvalidRequest, TooLarge
from epd_serve.media.video import load_pyav, opened
from epd_serve.types import AudioFacts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: Codecs that are decoded, by FFmpeg's names; those of plain samples begin with "pcm_".
CODECS = frozenset(("mp3", "flac", "vorbis", "opus", "aac", "alac"))
#: Names of formats as clients write them, by FFmpeg's.
FORMATS = {"wav": "wav", "mp3": "mp3", "flac": "flac", "ogg": "ogg"}
_MAX_RATE, _MAX_CHANNELS = 384_000, 8
#: Files of floating-point numbers hold any. Full scale is 1, or 2**31 where integers were written so.
_LOUDEST = 1e10
#: A file that ends so much before what its header promises is cut off: seconds, and a part of the whole. Encoders
#: add and drop some frames.
_SLACK_S, _SLACK_PART = 0.1, 0.01
#: A WAV file that was written to a pipe has such a length, or a greater one.
_UNKNOWN_BYTES = 0x7FFF0000


class AudioLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one sound: bytes and seconds of its file. ``format``: that the request says; "": none."""

    max_bytes: int
    max_seconds: float
    format: str = ""


def read_audio_facts(data: bytes, limits: AudioLimits) -> AudioFacts:
    """The facts of a file, which is decoded to its end or beyond a limit.

    Raises InvalidRequest for a file that is no sound, is broken, is not of the format that the request says, or is
    beyond a limit; TooLarge for its bytes.
    """
    av, kind = load_pyav("sounds"), _kind(data, limits.max_bytes)
    if limits.format and kind != FORMATS[limits.format]:
        raise InvalidRequest(f"the audio is of the format {kind}, and the request says {limits.format}")
    if kind == "wav":
        _check_whole(data)
    with _opened(av, data, kind) as (file, stream):
        promised_s = 0.0 if stream.duration is None else float(stream.duration * stream.time_base)
        _check_length(promised_s, limits)
        num_samples = rate = channels = 0
        for frame in file.decode(stream):
            _check_frame(frame, rate, channels)
            rate, channels = frame.sample_rate, frame.layout.nb_channels
            num_samples += frame.samples
            _check_length(num_samples / rate, limits)
    if not num_samples:
        raise InvalidRequest("the audio has no samples")
    facts = AudioFacts(num_samples, rate, channels)
    if facts.duration_s < promised_s * (1 - _SLACK_PART) - _SLACK_S:
        raise InvalidRequest(
            f"the audio is cut off: it has {facts.duration_s:.1f} s of the {promised_s:.1f} s that its header says"
        )
    return facts


def read_samples(data: bytes, facts: AudioFacts, rate: int) -> Iterator[NDArray[np.float32]]:
    """The samples at ``rate``, piece by piece: the mean of all channels, -1 to 1.

    Raises InvalidRequest for a file that is broken or is not what its facts say.
    """
    av = load_pyav("sounds")
    found = 0
    with _opened(av, data, _kind(data, len(data))) as (file, stream):
        resampler = av.AudioResampler(format="flt", rate=rate)  # of 8 planes PyAV reads one more
        for frame in file.decode(stream):
            _check_frame(frame, facts.rate, facts.channels)
            found += frame.samples
            for piece in resampler.resample(frame):
                yield _mean(piece, facts.channels)
        for piece in resampler.resample(None):
            yield _mean(piece, facts.channels)
    if found != facts.num_samples:
        raise InvalidRequest(f"the audio has {found} samples, not {facts.num_samples} as was said of it")


def _mean(piece: Any, channels: int) -> NDArray[np.float32]:
    """The mean of all channels. Raises InvalidRequest for numbers of which the tower would make none."""
    import numpy as np  # the gateway has none, and decodes no samples

    with np.errstate(over="ignore", invalid="ignore"):
        mean: NDArray[np.float32] = piece.to_ndarray().reshape(-1, channels).mean(axis=1, dtype="float32")
    if not (np.abs(mean) <= _LOUDEST).all():  # a NaN is not, either
        raise InvalidRequest(f"the audio has samples that are no numbers, or beyond {_LOUDEST:g} times full scale")
    return mean


@contextmanager
def _opened(av: Any, data: bytes, kind: str) -> Iterator[tuple[Any, Any]]:
    """The container and its first stream of sound."""
    with opened(av, data, kind, "audio") as file:
        if not file.streams.audio:
            raise InvalidRequest("the file has no stream of sound, or is cut off before it")
        stream = file.streams.audio[0]
        name = None if stream.codec_context is None else stream.codec_context.codec.canonical_name
        if name is None or not (name in CODECS or name.startswith("pcm_")):
            raise InvalidRequest(
                f"the audio's codec is {name or 'unknown'}; supported are PCM, {', '.join(sorted(CODECS))}"
            )
        stream.codec_context.thread_count = 1  # the limits are of one process, and others decode beside it
        yield file, stream


def _kind(data: bytes, max_bytes: int) -> str:
    """FFmpeg's name of the container, by its first bytes."""
    if not data:
        raise InvalidRequest("the audio is empty (0 bytes)")
    if len(data) > max_bytes:
        raise TooLarge(f"the audio has {len(data)} bytes; at most {max_bytes} are accepted")
    head = bytes(data[:12])
    if head[:4] == b"RIFF" and head[8:] == b"WAVE":
        return "wav"
    if head[:4] == b"fLaC":
        return "flac"
    if head[:4] == b"OggS":
        return "ogg"
    if head[4:8] in (b"ftyp", b"moov", b"mdat", b"free", b"wide", b"skip"):
        return "mov"
    if head[:4] == b"\x1aE\xdf\xa3":
        return "matroska"
    if head[:3] == b"ID3" or (head[:1] == b"\xff" and len(head) > 1 and head[1] & 0xE6 in (0xE2, 0xE4, 0xE6)):
        return "mp3"
    raise InvalidRequest(
        f"the data is no sound that can be read (it starts with {head[:8]!r}); supported are WAV, MP3, FLAC, Ogg, "
        "MP4 and WebM"
    )


def _check_whole(data: bytes) -> None:
    """Raise InvalidRequest for a WAV file that ends before its samples do: FFmpeg takes that for its length."""
    position = 12
    while position + 8 <= len(data):
        size = int.from_bytes(data[position + 4 : position + 8], "little")
        found = len(data) - position - 8
        if data[position : position + 4] == b"data":
            if found < size < _UNKNOWN_BYTES:
                raise InvalidRequest(f"the audio is cut off: its header says {size} bytes, and {found} are there")
            return
        position += 8 + size + size % 2


def _check_frame(frame: Any, rate: int, channels: int) -> None:
    """Raise InvalidRequest for a frame that is broken or unlike those before it, where there were any."""
    if frame.is_corrupt:
        raise InvalidRequest("the audio is broken")
    found = frame.sample_rate, frame.layout.nb_channels
    if not (0 < found[0] <= _MAX_RATE and 0 < found[1] <= _MAX_CHANNELS):
        raise InvalidRequest(
            f"the audio has {found[0]} samples a second and {found[1]} channels; at most {_MAX_RATE} and "
            f"{_MAX_CHANNELS} are taken"
        )
    if rate and found != (rate, channels):
        raise InvalidRequest(
            f"the audio changes from {rate} samples a second and {channels} channels to {found[0]} and {found[1]}"
        )


def _check_length(seconds: float, limits: AudioLimits) -> None:
    if seconds > limits.max_seconds:
        raise InvalidRequest(
            f"the audio has more than {limits.max_seconds:g} s, the limit here: cut it shorter",
            code="audio_too_long",
        )
