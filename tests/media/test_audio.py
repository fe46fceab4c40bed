"""Sounds: facts of each format, samples at a model's rate, and what hostile files get."""

from __future__ import annotations

import struct
import sys
from collections.abc import AsyncIterator
from functools import cache

import numpy as np
import pytest
from clips import clip
from msgspec.structs import replace
from numpy.typing import NDArray
from pictures import noise, png
from places import FakePlace
from sounds import LIMITS, Sound, encoded, sound, tune

from epd_serve.errors import InvalidRequest
from epd_serve.media.audio import read_audio_facts, read_samples
from epd_serve.media.decoder_pool import DecoderPool
from epd_serve.media.picture import MediaLimits
from epd_serve.types import AudioFacts


@pytest.fixture
async def pool() -> AsyncIterator[DecoderPool]:
    pool = DecoderPool(cpu_s=5.0, limits=MediaLimits(max_pixels=1 << 22, max_bytes=1 << 24))
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("kind", "rate", "channels"),
    [
        ("wav", 16_000, 1),
        ("wav", 44_100, 2),
        ("flac", 24_000, 2),
        ("mp3", 44_100, 2),
        ("ogg", 48_000, 1),
        ("m4a", 44_100, 1),
        ("webm", 48_000, 2),
    ],
)
async def test_facts_and_samples_of_each_format(pool: DecoderPool, kind: str, rate: int, channels: int) -> None:
    data = sound(1, 2.3, rate, channels, kind)
    limits = replace(LIMITS, format=kind if kind in ("wav", "mp3", "flac", "ogg") else "")
    facts = await pool.audio_facts(data, limits, cpu_s=5.0)
    assert (facts.rate, facts.channels) == (rate, channels)
    assert facts.duration_s == pytest.approx(2.3, abs=0.06), "encoders pad"
    samples = await pool.samples(data, facts, 16_000, FakePlace(), cpu_s=5.0)
    assert samples.shape == (facts.count_at(16_000),)
    expected = Sound(data).samples()
    assert abs(len(expected) - len(samples)) <= 2
    least = min(len(expected), len(samples))
    np.testing.assert_allclose(samples[:least], expected[:least], atol=1e-6)
    if kind == "wav" and rate == 16_000:
        np.testing.assert_array_equal(samples, tune(1, 2.3, rate)[0] / np.float32(32768))


def of_floats(samples: NDArray[np.float32]) -> bytes:
    """A WAV file of floating-point numbers [n, channels] at 16 kHz."""
    channels = samples.shape[1]
    head = struct.pack("<HHIIHH", 3, channels, 16_000, 64_000 * channels, 4 * channels, 32)
    body = samples.astype("<f4").tobytes()
    sizes = struct.pack("<I", 36 + len(body)), struct.pack("<I", len(body))
    return b"RIFF" + sizes[0] + b"WAVEfmt \x10\0\0\0" + head + b"data" + sizes[1] + body


@pytest.mark.parametrize("channels", range(1, 9))
async def test_all_channels_are_averaged(pool: DecoderPool, channels: int) -> None:
    """Also of 7.1, whose planes PyAV reads beyond their end."""
    samples = np.random.default_rng(channels).uniform(-1, 1, (16_000, channels)).astype(np.float32)
    data = of_floats(samples)
    facts = await pool.audio_facts(data, LIMITS, cpu_s=5.0)
    found = await pool.samples(data, facts, 16_000, FakePlace(), cpu_s=5.0)
    np.testing.assert_allclose(found, samples.mean(axis=1), atol=1e-6)


GOOD = sound(2, 20.0)


@cache
def packed(kind: str) -> bytes:
    return sound(2, 20.0, 48_000, kind=kind)


@cache
def silence() -> bytes:
    """An hour in less than a megabyte."""
    return encoded(np.zeros((1, 3600 * 16_000), np.int16), 16_000, "flac")


def lying(data: bytes) -> bytes:
    """A FLAC file whose header says that it has a second."""
    found = bytearray(data)
    found[21] &= 0xF0
    found[22:26] = (16_000).to_bytes(4)
    return bytes(found)


@cache
def hostile() -> dict[str, tuple[bytes, str]]:
    return {
        "empty": (b"", "empty"),
        "text": (b"no sound at all, but text", "not readable audio"),
        "a picture": (png(noise(1)), "not readable audio"),
        "a playlist": (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "not readable audio"),
        "a video without sound": (clip(0, 12), "no audio stream"),
        "cut": (GOOD[: len(GOOD) // 2], "truncated: its header says 640000 bytes, but it has 319961"),
        "header alone": (GOOD[:44], "truncated|no samples"),
        "cut FLAC": (packed("flac")[: len(packed("flac")) // 2], "truncated"),
        "cut M4A": (packed("m4a")[: len(packed("m4a")) // 2], "truncated"),
        "broken MP3": (packed("mp3")[:400] + bytes(30_000) + b"\xff" * 2000, "corrupt|truncated"),
        "an hour of silence": (silence(), "limit of 120 s"),
        "an hour that says it is a second": (lying(silence()), "limit of 120 s"),
    }


async def test_hostile_files_are_refused_in_a_sentence(pool: DecoderPool) -> None:
    for data, words in hostile().values():
        with pytest.raises(InvalidRequest, match=words):
            await pool.audio_facts(data, LIMITS, cpu_s=5.0)
    assert (await pool.audio_facts(sound(), LIMITS, cpu_s=5.0)).num_samples == 24_000


async def test_what_takes_long_is_refused(pool: DecoderPool) -> None:
    with pytest.raises(InvalidRequest, match=r"more than 0[.]15 s of CPU time"):
        await pool.audio_facts(silence(), replace(LIMITS, max_seconds=4000.0), cpu_s=0.15)


def test_a_file_that_is_not_what_its_facts_say_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="320000 samples, not 24000"):
        list(read_samples(GOOD, AudioFacts(24_000, 16_000, 1), 16_000))
    with pytest.raises(InvalidRequest, match="changes from 8000"):
        list(read_samples(GOOD, AudioFacts(24_000, 8_000, 1), 16_000))


def test_files_made_of_any_good_one_end_in_a_sentence_or_in_samples() -> None:
    """Bytes flipped and cut: no other exception."""
    rng = np.random.default_rng(0)
    num_refused = 0
    for good in (sound(3, 0.5, kind=kind, rate=48_000) for kind in ("wav", "mp3", "flac", "ogg", "m4a", "webm")):
        for _ in range(25):
            data = bytearray(good[: rng.integers(20, len(good) + 1)])
            for place in rng.integers(0, len(data), 6):
                data[place] = rng.integers(0, 256)
            try:
                facts = read_audio_facts(bytes(data), LIMITS)
                assert sum(map(len, read_samples(bytes(data), facts, 16_000))) > 0
            except InvalidRequest:
                num_refused += 1
    assert 30 < num_refused < 150


def test_samples_without_pyav_are_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder's installation may differ from the gateway's, which has read the facts."""
    data = sound(1, 0.5, 16_000, 1, "wav")
    facts = read_audio_facts(data, LIMITS)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(InvalidRequest) as refusal:
        next(read_samples(data, facts, 16_000))
    assert refusal.value.code == "unsupported_media"
