"""Audio files: read their facts, and decode them to samples at a model's rate.

Reading the facts decodes the whole file, because the number of prompt tokens depends on the number of samples,
which headers of compressed files do not state. All this runs in the processes of
:mod:`epd_serve.media.decoder`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from epd_serve.errors import InvalidRequest
from epd_serve.media.container import container_of, load_pyav, opened
from epd_serve.types import AudioFacts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: Accepted codecs, by FFmpeg name, in addition to PCM ("pcm_...").
CODECS = frozenset(("mp3", "flac", "vorbis", "opus", "aac", "alac"))
_MAX_RATE, _MAX_CHANNELS = 384_000, 8
#: Limit for floating-point samples. Full scale is 1, or 2**31 in files that store integers as floats.
_LOUDEST = 1e10
#: A file counts as truncated if it is shorter than its header states by more than this many seconds plus this
#: fraction. Encoders add and drop some frames.
_SLACK_S, _SLACK_PART = 0.1, 0.01
#: WAV files written to a pipe state this length or a greater one.
_UNKNOWN_BYTES = 0x7FFF0000


class AudioLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on the bytes and seconds of an audio file. ``format`` is the one named by the request, or ""."""

    max_bytes: int
    max_seconds: float
    format: str = ""


def read_audio_facts(data: bytes, limits: AudioLimits) -> AudioFacts:
    """Return the facts of a file, decoding it to its end.

    Raises InvalidRequest if the file is not audio, is corrupt, contradicts the format in the request or exceeds a
    limit; TooLarge if it has too many bytes.
    """
    kind = container_of(data, "audio", limits.max_bytes)
    if limits.format and kind != limits.format:
        raise InvalidRequest(f"the audio has format {kind}, but the request says {limits.format}")
    if kind == "wav":
        _check_whole(data)
    with opened(data, "audio", kind, CODECS) as (file, stream):
        promised_s = 0.0 if stream.duration is None else float(stream.duration * stream.time_base)
        _check_length(promised_s, limits)
        num_samples = rate = channels = 0
        for frame in file.decode(stream):
            _check_frame(frame, rate, channels)
            rate, channels = frame.sample_rate, frame.layout.nb_channels
            num_samples += frame.samples
            _check_length(num_samples / rate, limits)
    if not num_samples:
        raise InvalidRequest("the audio contains no samples")
    facts = AudioFacts(num_samples, rate, channels)
    if facts.duration_s < promised_s * (1 - _SLACK_PART) - _SLACK_S:
        raise InvalidRequest(
            f"the audio is truncated: it has {facts.duration_s:.1f} s of the {promised_s:.1f} s in its header"
        )
    return facts


def read_samples(data: bytes, facts: AudioFacts, rate: int) -> Iterator[NDArray[np.float32]]:
    """Yield the samples at ``rate`` in pieces: the mean of all channels, from -1 to 1.

    Raises InvalidRequest if the file is corrupt or does not match its facts.
    """
    av, found, kind = load_pyav("sounds"), 0, container_of(data, "audio", len(data))
    with opened(data, "audio", kind, CODECS) as (file, stream):
        resampler = av.AudioResampler(format="flt", rate=rate)  # with 8 planes PyAV reads a ninth
        for frame in file.decode(stream):
            _check_frame(frame, facts.rate, facts.channels)
            found += frame.samples
            for piece in resampler.resample(frame):
                yield _mean(piece, facts.channels)
        for piece in resampler.resample(None):
            yield _mean(piece, facts.channels)
    if found != facts.num_samples:
        raise InvalidRequest(f"the audio has {found} samples, not {facts.num_samples} as announced")


def _mean(piece: Any, channels: int) -> NDArray[np.float32]:
    """Return the mean of all channels. Raises InvalidRequest for NaN and for values that overflow in the tower."""
    import numpy as np  # not installed at the gateway, which decodes no samples

    with np.errstate(over="ignore", invalid="ignore"):
        mean: NDArray[np.float32] = piece.to_ndarray().reshape(-1, channels).mean(axis=1, dtype="float32")
    if not (np.abs(mean) <= _LOUDEST).all():  # also catches NaN
        raise InvalidRequest(f"the audio contains NaN or samples beyond {_LOUDEST:g} times full scale")
    return mean


def _check_whole(data: bytes) -> None:
    """Raise InvalidRequest for a truncated WAV file, which FFmpeg would accept as a shorter one."""
    position = 12
    while position + 8 <= len(data):
        size = int.from_bytes(data[position + 4 : position + 8], "little")
        found = len(data) - position - 8
        if data[position : position + 4] == b"data":
            if found < size < _UNKNOWN_BYTES:
                raise InvalidRequest(f"the audio is truncated: its header says {size} bytes, but it has {found}")
            return
        position += 8 + size + size % 2


def _check_frame(frame: Any, rate: int, channels: int) -> None:
    """Raise InvalidRequest if a frame is corrupt or differs from previous frames (if ``rate`` > 0)."""
    if frame.is_corrupt:
        raise InvalidRequest("the audio is corrupt")
    found = frame.sample_rate, frame.layout.nb_channels
    if not (0 < found[0] <= _MAX_RATE and 0 < found[1] <= _MAX_CHANNELS):
        raise InvalidRequest(
            f"the audio has {found[0]} samples per second and {found[1]} channels; at most {_MAX_RATE} and "
            f"{_MAX_CHANNELS} are accepted"
        )
    if rate and found != (rate, channels):
        raise InvalidRequest(
            f"the audio changes from {rate} Hz and {channels} channels to {found[0]} Hz and {found[1]} channels"
        )


def _check_length(seconds: float, limits: AudioLimits) -> None:
    if seconds > limits.max_seconds:
        raise InvalidRequest(
            f"the audio is longer than the limit of {limits.max_seconds:g} s: shorten it",
            code="audio_too_long",
        )
