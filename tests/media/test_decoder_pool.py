"""Pictures decoded in processes: the same pixels, bounded time and memory, and no process left over."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pictures import LIMITS, noise
from PIL import Image

from epd_serve.errors import InvalidRequest, ServeError, Unavailable
from epd_serve.media import decoder_pool
from epd_serve.media.decoder import Ended, GrammarJob, Started
from epd_serve.media.decoder_pool import DecoderPool, _Task, _Worker
from epd_serve.media.picture import FORMATS, low_detail_size, open_image

WIDE = replace(LIMITS, max_pixels=1 << 28)


class Room:
    """A place beside which there is room for so many."""

    def __init__(self, num_aside: int = 9) -> None:
        self.num_aside = num_aside
        self.num_asked = 0
        self.is_aside = False
        self.has_room = asyncio.Event()

    def step_aside(self) -> bool:
        self.is_aside = self.is_aside or self.num_aside > 0
        return self.is_aside

    async def wait_aside(self) -> None:
        self.num_asked += 1
        await self.has_room.wait()
        self.is_aside = True


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def endless(size: tuple[int, int] = (4000, 3000), scans: int = 90) -> bytes:
    """A small progressive JPEG that passes all counts and takes seconds to decode."""
    data = saved(Image.new("RGB", size, "teal"), "JPEG", progressive=True)
    last, end = data.rindex(b"\xff\xda"), data.rindex(b"\xff\xd9")
    return data[:end] + data[last:end] * (scans - 10) + data[end:]


ENDLESS = endless()


@pytest.fixture
async def pool() -> AsyncIterator[DecoderPool]:
    pool = DecoderPool(1, cpu_s=0.3, limits=WIDE)
    yield pool
    pool.close()


@pytest.fixture
async def patient_pool(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DecoderPool]:
    monkeypatch.setattr(decoder_pool, "_FAIR_S", 60.0)  # a worker that gives way ends after its picture
    pool = DecoderPool(1, cpu_s=60.0, limits=WIDE)
    yield pool
    pool.close()


async def decode(
    pool: DecoderPool, data: bytes, size: tuple[int, int], room: Room | None = None, *, low_detail: bool = False
) -> Image.Image:
    async with pool.decoded(data, size, room or Room(), low_detail=low_detail) as pixels:
        return Image.fromarray(pixels)


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    return [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]


def workers(pool: DecoderPool) -> list[int]:
    assert pool._server is not None
    return children(pool._server.pid)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("kind", FORMATS)
async def test_pixels_are_those_of_this_process(patient_pool: DecoderPool, kind: str) -> None:
    for size in ((120, 90), (1, 7), (2500, 2100) if kind == "BMP" else (500, 400)):
        data = saved(noise(3, size), kind)
        picture = await decode(patient_pool, data, size)
        assert picture.size == size and picture.tobytes() == open_image(data, WIDE).tobytes()
    data = saved(noise(3, (700, 300)), kind)
    small = low_detail_size((700, 300))
    picture = await decode(patient_pool, data, small, low_detail=True)
    expected = open_image(data, WIDE).resize(small, Image.Resampling.BICUBIC)
    assert picture.tobytes() == expected.tobytes()


async def test_a_picture_that_takes_too_long_is_refused_and_the_next_one_is_decoded(pool: DecoderPool) -> None:
    good = saved(noise(1), "PNG")
    await decode(pool, good, (120, 90))
    before = os.times()
    with pytest.raises(InvalidRequest, match=r"more than 0.3 s of processor time") as refused:
        await decode(pool, ENDLESS, (4000, 3000))
    assert (refused.value.status, refused.value.code) == (400, "image_too_complex")
    assert (await decode(pool, good, (120, 90))).size == (120, 90)
    pool.close()
    after = os.times()
    spent_s = after.children_user + after.children_system - before.children_user - before.children_system
    assert spent_s < 1.5, "the process, a good picture twice, and 0.3 s"


async def test_a_picture_that_is_broken_keeps_its_worker(patient_pool: DecoderPool) -> None:
    good = saved(noise(1), "PNG")
    await decode(patient_pool, good, (120, 90))
    [worker] = workers(patient_pool)
    for data, size, words in (
        (b"no image at all", (1, 1), "no image"),
        (good[:-200], (120, 90), "broken"),
        (good, (90, 120), "decodes to 120x90"),
        (good, (1 << 15, 1 << 15), "at most 268435456"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            await decode(patient_pool, data, size)
    await decode(patient_pool, good, (120, 90))
    assert workers(patient_pool) == [worker]


async def test_a_picture_costs_no_fresh_memory(patient_pool: DecoderPool) -> None:
    """Pages that the kernel must clear for each picture cost as much processor time as its decoding."""
    size = 1024, 768
    data = saved(noise(1, size), "JPEG")

    def num_faults() -> int:
        [worker] = workers(patient_pool)
        return int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[7])

    for _ in range(3):
        await decode(patient_pool, data, size)
    before = num_faults()
    for _ in range(5):
        await decode(patient_pool, data, size)
    assert num_faults() - before < 5 * 300, "its pixels are 768 pages as Pillow has them"


async def test_a_worker_that_a_file_has_taken_over_harms_itself_alone() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    worker = _Worker(ours)
    with theirs:
        await worker.give(_Task("image", b"file", 6, GrammarJob(), cpu_s=1.0))
        with pytest.raises(PermissionError):
            os.ftruncate(worker.descriptor, 0)  # whoever reads the pixels would get a SIGBUS
        theirs.send(msgspec.msgpack.encode(Started(7)))
        for message in (b"\xc1", b"\x80", msgspec.msgpack.encode({"type": "refused"})):
            theirs.send(message)
            assert await worker.answer(60) == Ended(-signal.SIGABRT)
        theirs.send(msgspec.msgpack.encode(Started(os.getpid())))  # would have this process step back
        assert worker.is_gone() and worker._pid == 7
    worker.close()


async def test_memory_is_bounded_by_the_pixels() -> None:
    """The limit is what the header explains; a decoder that wants more is told that there is none."""
    script = """
import resource, sys
from epd_serve.media import decoder
decoder._limit_memory(64 << 20)
try:
    bytearray(128 << 20)
except MemoryError:
    print("none")
decoder._limit_memory(None)
print(len(bytearray(128 << 20)) >> 20)
"""
    done = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.split() == ["none", "128"], done.stderr


async def test_a_worker_that_is_killed_fails_its_picture_alone(patient_pool: DecoderPool) -> None:
    good = saved(noise(1), "PNG")
    await decode(patient_pool, good, (120, 90))
    slow = asyncio.create_task(decode(patient_pool, ENDLESS, (4000, 3000)))
    [worker] = workers(patient_pool)
    others = [asyncio.create_task(decode(patient_pool, good, (120, 90))) for _ in range(3)]
    await asyncio.gather(*others)
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(Unavailable, match="SIGKILL"):
        await slow
    assert (await decode(patient_pool, good, (120, 90))).size == (120, 90)


async def test_a_worker_that_crashes_blames_the_picture(patient_pool: DecoderPool) -> None:
    await decode(patient_pool, saved(noise(1), "PNG"), (120, 90))
    [worker] = workers(patient_pool)
    slow = asyncio.create_task(decode(patient_pool, ENDLESS, (4000, 3000)))
    await asyncio.sleep(0.05)
    os.kill(worker, signal.SIGSEGV)
    with pytest.raises(InvalidRequest, match="crashes its decoder"):
        await slow


async def test_the_pool_is_whole_again_after_its_process_is_killed(patient_pool: DecoderPool) -> None:
    good = saved(noise(1), "PNG")
    await decode(patient_pool, good, (120, 90))
    server = patient_pool._server
    assert server is not None
    server.kill()
    await asyncio.to_thread(server.wait)
    assert (await decode(patient_pool, good, (120, 90))).size == (120, 90)
    slow = asyncio.create_task(decode(patient_pool, ENDLESS, (4000, 3000)))
    await asyncio.sleep(0.05)
    assert patient_pool._server is not None
    patient_pool._server.kill()
    with pytest.raises(Unavailable):
        await slow
    assert (await decode(patient_pool, good, (120, 90))).size == (120, 90)


async def test_a_slow_picture_without_room_beside_the_others_begins_again_later(patient_pool: DecoderPool) -> None:
    room = Room(num_aside=0)
    data = endless((1500, 1000), 80)
    slow = asyncio.create_task(decode(patient_pool, data, (1500, 1000), room))
    await until(lambda: room.num_asked == 1)
    await until(lambda: not workers(patient_pool))  # it is ended meanwhile
    room.has_room.set()
    picture = await slow
    assert picture.tobytes() == open_image(data, WIDE).tobytes()


async def test_who_leaves_ends_the_decoding(patient_pool: DecoderPool) -> None:
    slow = asyncio.create_task(decode(patient_pool, endless(scans=100), (4000, 3000)))
    await until(lambda: patient_pool.is_started and bool(workers(patient_pool)))
    await asyncio.sleep(0.05)
    [worker] = workers(patient_pool)
    slow.cancel()
    await asyncio.gather(slow, return_exceptions=True)
    await until(lambda: worker not in workers(patient_pool))


async def test_many_at_once_and_few_are_kept(patient_pool: DecoderPool) -> None:
    data = {seed: saved(noise(seed, (400, 300)), "PNG") for seed in range(24)}
    pictures = await asyncio.gather(*(decode(patient_pool, one, (400, 300)) for one in data.values()))
    for seed, picture in enumerate(pictures):
        assert picture.tobytes() == noise(seed, (400, 300)).convert("RGB").tobytes()
    await until(lambda: len(workers(patient_pool)) <= 1)


async def test_random_ends_leave_the_pool_whole(pool: DecoderPool) -> None:
    """Cancelled, broken and slow pictures in all orders; then it decodes, and nothing else is left."""
    good, broken = saved(noise(1), "PNG"), saved(noise(1), "PNG")[:-100]
    for round_ in range(12):
        tasks = [
            asyncio.create_task(decode(pool, data, size))
            for data, size in ((good, (120, 90)), (broken, (120, 90)), (ENDLESS, (4000, 3000)), (good, (120, 90)))
        ]
        await asyncio.sleep(0.004 * round_)
        for task in tasks[round_ % 4 :]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(r, Image.Image | ServeError | asyncio.CancelledError) for r in results), results
    assert (await decode(pool, good, (120, 90))).size == (120, 90)
    await until(lambda: len(workers(pool)) <= 1)


PROGRAM = """
import asyncio, sys
from epd_serve.media import decoder_pool
from epd_serve.media.decoder_pool import DecoderPool, _Task
from epd_serve.media.picture import MediaLimits

class Place:
    is_aside = True
    def step_aside(self): return True
    async def wait_aside(self): pass

async def main():
    pool = DecoderPool(1, cpu_s=60, limits=MediaLimits(max_pixels=1 << 28, max_bytes=1 << 30))
    pool.start()
    print(pool._server.pid, flush=True)
    async with pool.decoded(sys.stdin.buffer.read(), (4000, 3000), Place()):
        pass

asyncio.run(main())
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_nothing_outlives_an_instance_that_is_killed() -> None:
    with subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as program:
        assert program.stdin is not None and program.stdout is not None
        program.stdin.write(ENDLESS)
        program.stdin.close()
        server = int(await asyncio.to_thread(program.stdout.readline))
        await until(lambda: bool(children(server)))
        family = [server, *children(server)]
        program.kill()
        await until(lambda: not any(map(is_alive, family)))
