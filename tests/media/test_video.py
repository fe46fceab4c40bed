"""Videos: facts of each container, frames by number, and what hostile files get."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import cache

import numpy as np
import pytest
from clips import LIMITS, clip, moving, wide
from msgspec.structs import replace
from pictures import noise, png
from PIL import Image
from places import FakePlace, until_idle

from epd_serve.errors import InvalidRequest
from epd_serve.media import decoder_pool
from epd_serve.media.decoder_pool import DecoderPool
from epd_serve.media.picture import MediaLimits
from epd_serve.media.video import _decoded, read_facts, read_frames, read_list
from epd_serve.types import VideoFacts


@pytest.fixture
async def pool() -> AsyncIterator[DecoderPool]:
    pool = DecoderPool(cpu_s=5.0, limits=MediaLimits(max_pixels=1 << 22, max_bytes=1 << 24))
    yield pool
    pool.close()


async def frames_of(pool: DecoderPool, data: bytes, facts: VideoFacts, indices: list[int]) -> list[np.ndarray]:
    found: list[np.ndarray] = []
    async with aclosing(pool.frames(data, facts, indices, FakePlace(), cpu_s=5.0)) as chunks:
        async for chunk in chunks:
            found.extend(chunk.copy())
    return found


@pytest.mark.parametrize(
    ("codec", "container"),
    [
        ("libx264", "mp4"),
        ("libx264", "matroska"),
        ("libx264", "mpegts"),
        ("libx265", "mp4"),
        ("libvpx-vp9", "webm"),
        ("libvpx", "webm"),
        ("libsvtav1", "mp4"),
        ("mpeg4", "avi"),
        ("mjpeg", "avi"),
    ],
)
def test_facts_and_frames_of_each_container(codec: str, container: str) -> None:
    data = clip(1, 33, fps=25, codec=codec, container=container)
    facts = read_facts(data, LIMITS)
    assert facts == VideoFacts(64, 48, 33, 25.0)
    expected = moving(1, 33)
    for index, frame in zip((0, 7, 7, 32), read_frames(data, facts, (0, 7, 7, 32)), strict=True):
        errors = [np.abs(one.astype(int) - frame).mean() for one in expected]
        assert int(np.argmin(errors)) == index
    assert os.sched_getscheduler(0) == os.SCHED_OTHER, "processes of later tests would take it on"


@pytest.mark.parametrize(
    ("codec", "container", "options", "skipped"),
    [
        ("libx264", "mp4", {"g": "8", "bf": "2"}, 24),
        ("libx264", "matroska", {"g": "8", "bf": "2"}, 24),
        ("libx264", "mp4", {"x264-params": "keyint=8:min-keyint=8:open-gop=1:bframes=3:scenecut=0"}, None),
        ("libx264", "mp4", {"x264-params": "keyint=10:intra-refresh=1:bframes=0"}, None),
        ("libx265", "mp4", {"x265-params": "keyint=8:min-keyint=8:open-gop=1:bframes=3:log-level=none"}, None),
        ("libvpx-vp9", "webm", {"g": "8"}, 24),
        ("libsvtav1", "mp4", {"g": "8"}, 24),
        ("libx264", "mpegts", {"g": "8"}, 0),
        ("libvpx", "webm", {"g": "8"}, 0),
        ("mpeg4", "avi", {"g": "8"}, 0),
    ],
)
def test_later_frames_are_those_of_the_whole_file(
    codec: str, container: str, options: dict[str, str], skipped: int | None
) -> None:
    """To the bit, whether or not earlier frames are skipped: by default, all before the last key frame."""
    data = clip(1, 40, fps=25, codec=codec, container=container, **options)
    facts = read_facts(data, LIMITS)
    whole = list(read_frames(data, facts, range(40)))
    for first in (1, 9, 27, 39):
        found = list(read_frames(data, facts, range(first, 40)))
        assert all(np.array_equal(one, other) for one, other in zip(found, whole[first:], strict=True)), first
    decoded = _decoded(data, facts, 27)
    if skipped is not None:
        assert next(decoded, (0, None))[0] == skipped
    decoded.close()


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_frames_are_turned_as_the_camera_says(turns: int) -> None:
    data = clip(2, 5, rotation=90 * turns)
    facts = read_facts(data, LIMITS)
    assert (facts.width, facts.height) == ((48, 64) if turns % 2 else (64, 48))
    (frame,) = read_frames(data, facts, (0,))
    assert np.abs(np.rot90(moving(2, 1)[0], turns).astype(int) - frame).mean() < 10


GOOD = clip(3, 60)


@cache
def hostile() -> dict[str, tuple[bytes, str]]:
    return {
        "empty": (b"", "empty"),
        "text": (b"no video at all, but text", "not a readable video"),
        "picture": (png(noise(1)), "not a readable video"),
        "gif": (b"GIF89a" + bytes(400), "is a GIF: send it as image_url"),
        "cut in the middle": (GOOD[: len(GOOD) // 2], "corrupt or truncated after"),
        "without its last frame": (GOOD[:-40], "corrupt or truncated after 59 frames"),
        "header alone": (GOOD[:100], "truncated"),
        "playlist": (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "not a readable video"),
        "wide": (wide(), "10000×10000"),
        "long": (clip(0, 250, fps=2), "at most 120 s"),
        "many frames": (clip(0, 2001, (16, 16), fps=250, codec="mpeg4", container="avi"), "more than 2000 frames"),
    }


def test_hostile_files_are_refused_in_a_sentence() -> None:
    for data, words in hostile().values():
        with pytest.raises(InvalidRequest, match=words):
            read_facts(data, LIMITS)


def test_no_damage_makes_more_than_a_refusal() -> None:
    """Whatever byte is changed: frames of the size that was read, or InvalidRequest."""
    rng = np.random.default_rng(0)
    for _ in range(150):
        data = bytearray(GOOD)
        for position in rng.integers(0, len(data), 20):
            data[position] = int(rng.integers(0, 256))
        try:
            facts = read_facts(bytes(data), LIMITS)
            for frame in read_frames(bytes(data), facts, range(facts.num_frames)):
                assert frame.shape == (facts.height, facts.width, 3)
        except InvalidRequest:
            pass


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([png(noise(0)), png(noise(0, (60, 60)))], "frame 1 of the video has 60x60 pixels"),
        ([png(noise(0)), b"nothing"], "frame 1 of the video: the data is not a readable image"),
        ([png(Image.new("L", (4096, 4096)))], "frame 0 of the video"),
        ([png(noise(0))] * 2001, "at most 2000"),
    ],
)
def test_frame_lists_are_refused_by_frame(frames: list[bytes], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        read_list(frames, 2.0, LIMITS)


async def test_frames_come_some_at_a_time(pool: DecoderPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_pool, "_FRAMES_BYTES", 5 * 64 * 48 * 3)
    facts = await pool.facts(GOOD, LIMITS)
    assert facts == VideoFacts(64, 48, 60, 4.0)
    indices = [0, 1, 2, 5, 8, 13, 13, 21, 34, 55, 59]
    found = await frames_of(pool, GOOD, facts, indices)
    expected = list(read_frames(GOOD, facts, indices))
    assert len(found) == len(indices) and all(map(np.array_equal, found, expected))


async def test_a_reader_that_leaves_leaves_no_worker(pool: DecoderPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_pool, "_FRAMES_BYTES", 64 * 48 * 3)
    facts = await pool.facts(GOOD, LIMITS)
    async with aclosing(pool.frames(GOOD, facts, range(60), FakePlace(), cpu_s=5.0)) as chunks:
        async for _ in chunks:
            break
    await until_idle()
    assert len(await frames_of(pool, GOOD, facts, [3])) == 1


async def test_a_video_that_takes_too_long_is_ended(pool: DecoderPool) -> None:
    data = clip(4, 200, (640, 480), fps=10, codec="mpeg4", container="avi")
    facts = await pool.facts(data, LIMITS)
    with pytest.raises(InvalidRequest, match=r"took more than 0\.01 s of CPU time") as caught:
        async with aclosing(pool.frames(data, facts, [199], FakePlace(), cpu_s=0.01)) as chunks:
            async for _ in chunks:
                pass
    assert caught.value.code == "video_too_complex"
    await until_idle()


def test_a_reader_counts_what_it_decodes() -> None:
    """A container that promises more frames than there are is broken, not shortened."""
    facts = replace(read_facts(GOOD, LIMITS), num_frames=61)
    with pytest.raises(InvalidRequest, match="ends after 60 frames but its container lists 61"):
        list(read_frames(GOOD, facts, (0, 60)))
