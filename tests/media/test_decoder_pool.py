"""Pictures decoded in processes: the same pixels, bounded time and memory, and no process left over."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path
from textwrap import dedent

import psutil
import pytest
from pictures import LIMITS, noise, saved, with_scans
from PIL import Image
from places import FakePlace, decoders, until_idle

from epd_serve.errors import InvalidRequest, ServeError, Unavailable
from epd_serve.media.decoder_pool import DecoderPool
from epd_serve.media.picture import FORMATS, low_detail_size, open_image

WIDE = replace(LIMITS, max_pixels=1 << 28, max_bytes=1 << 28)


def endless(size: tuple[int, int] = (4000, 3000), scans: int = 90) -> bytes:
    """A small progressive JPEG that passes all counts and takes seconds to decode."""
    return with_scans(Image.new("RGB", size, "teal"), scans - 10)


ENDLESS = endless()
GOOD = saved(noise(1), "PNG")


@pytest.fixture
async def pool() -> AsyncIterator[DecoderPool]:
    pool = DecoderPool(cpu_s=0.3, limits=WIDE)
    yield pool
    pool.close()


@pytest.fixture
async def patient_pool() -> AsyncIterator[DecoderPool]:
    pool = DecoderPool(cpu_s=60.0, limits=WIDE)
    yield pool
    pool.close()


async def decode(
    pool: DecoderPool,
    data: bytes = GOOD,
    size: tuple[int, int] = (120, 90),
    place: FakePlace | None = None,
    *,
    low_detail: bool = False,
) -> Image.Image:
    async with pool.decoded(data, size, place or FakePlace(), low_detail=low_detail) as pixels:
        return Image.fromarray(pixels)


async def one_decoder() -> int:
    """Return the process that decodes, once there is one at work."""
    async with asyncio.timeout(60):
        while True:
            for pid in decoders():
                if psutil.Process(pid).cpu_times().user > 0:
                    return pid
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
    before = os.times()
    with pytest.raises(InvalidRequest) as refused:
        await decode(pool, ENDLESS, (4000, 3000))
    assert (refused.value.status, refused.value.code) == (400, "image_too_complex")
    assert (await decode(pool)).size == (120, 90)
    pool.close()
    after = os.times()
    spent_s = after.children_user + after.children_system - before.children_user - before.children_system
    assert spent_s < 1.5, "the process that forks, a good picture, and 0.3 s"


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (b"no image at all", (1, 1)),
        (GOOD[:-200], (120, 90)),
        (GOOD, (90, 120)),
        (GOOD, (1 << 15, 1 << 15)),
        (b"", (1, 1)),
    ],
)
async def test_a_broken_picture_is_refused(pool: DecoderPool, data: bytes, size: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequest):
        await decode(pool, data, size)


async def test_a_slow_picture_begins_again_in_a_slow_place(patient_pool: DecoderPool) -> None:
    data, size = endless((1500, 1000), 80), (1500, 1000)
    place = FakePlace(is_slow=False)
    slow = asyncio.create_task(decode(patient_pool, data, size, place))
    await place.asked.wait()
    await until_idle()
    assert (await decode(patient_pool, place=FakePlace(is_slow=False))).size == (120, 90)
    place.is_free.set()
    assert (await slow).tobytes() == open_image(data, WIDE).tobytes()


@pytest.mark.parametrize(
    ("signum", "error", "code"),
    [(signal.SIGKILL, Unavailable, "decoder_lost"), (signal.SIGSEGV, InvalidRequest, "image_crashes_decoder")],
)
async def test_a_worker_that_ends_fails_its_picture_alone(
    patient_pool: DecoderPool, signum: int, error: type[ServeError], code: str
) -> None:
    slow = asyncio.create_task(decode(patient_pool, ENDLESS, (4000, 3000)))
    worker = await one_decoder()
    await asyncio.gather(*(decode(patient_pool) for _ in range(3)))
    os.kill(worker, signum)
    with pytest.raises(error) as failed:
        await slow
    assert failed.value.code == code
    assert (await decode(patient_pool)).size == (120, 90)


async def test_a_worker_that_hangs_is_ended(pool: DecoderPool) -> None:
    slow = asyncio.create_task(decode(pool, ENDLESS, (4000, 3000)))
    os.kill(await one_decoder(), signal.SIGSTOP)
    started_s = time.monotonic()
    with pytest.raises(ServeError) as failed:
        await slow
    assert failed.value.code == "decoder_stalled" and time.monotonic() - started_s < 30
    await until_idle()


async def test_the_pool_is_whole_again_after_its_process_is_killed(patient_pool: DecoderPool) -> None:
    slow = asyncio.create_task(decode(patient_pool, ENDLESS, (4000, 3000)))
    server = psutil.Process(await one_decoder()).parent()
    assert server is not None
    server.kill()
    with pytest.raises(Unavailable):
        await slow
    await asyncio.to_thread(server.wait)
    assert (await decode(patient_pool)).size == (120, 90)


@pytest.fixture
def patched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Runs code at the start of the process that forks workers."""

    def patch(code: str) -> None:
        (tmp_path / "sitecustomize.py").write_text(dedent(code))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    return patch


async def test_an_unforeseen_error_refuses_its_picture(
    patient_pool: DecoderPool, patched: Callable[[str], None], capfd: pytest.CaptureFixture[str]
) -> None:
    patched("""
        from PIL import Image

        def crop(*_):
            raise ArithmeticError("two and two make five")

        Image.Image.crop = crop
    """)
    with pytest.raises(InvalidRequest):
        await decode(patient_pool, saved(noise(3, (500, 400)), "PNG"), (500, 400))
    assert "two and two make five" in capfd.readouterr().err
    assert (await decode(patient_pool)).size == (120, 90)


async def test_a_worker_that_cannot_be_forked_fails_its_picture_alone(
    patient_pool: DecoderPool, patched: Callable[[str], None]
) -> None:
    patched("""
        import os

        errors, fork = [OSError("no more processes")], os.fork

        def fork_later():
            if errors:
                raise errors.pop()
            return fork()

        os.fork = fork_later
    """)
    with pytest.raises(Unavailable) as failed:
        await decode(patient_pool)
    assert failed.value.code == "decoder_lost"
    assert (await decode(patient_pool)).size == (120, 90)


@pytest.mark.parametrize("num_free", [0, 1])
async def test_a_worker_without_descriptors_fails_its_picture_alone(
    patient_pool: DecoderPool, num_free: int
) -> None:
    slow = asyncio.create_task(decode(patient_pool, endless((1500, 1000), 80), (1500, 1000)))
    server = psutil.Process(await one_decoder()).parent()
    assert server is not None
    limits, open_files = server.rlimit(resource.RLIMIT_NOFILE), Path(f"/proc/{server.pid}/fd")
    free = next(number for number in count() if not (open_files / str(number)).is_symlink())
    server.rlimit(resource.RLIMIT_NOFILE, (free + num_free, limits[1]))
    with pytest.raises(Unavailable) as failed:
        await decode(patient_pool)
    assert failed.value.code == "decoder_lost"
    server.rlimit(resource.RLIMIT_NOFILE, limits)
    assert (await decode(patient_pool)).size == (120, 90)
    assert (await slow).size == (1500, 1000)


async def test_many_at_once_leave_no_process(patient_pool: DecoderPool) -> None:
    await decode(patient_pool)
    num_open = psutil.Process().num_fds()
    data = {seed: saved(noise(seed, (400, 300)), "PNG") for seed in range(24)}
    pictures = await asyncio.gather(*(decode(patient_pool, one, (400, 300)) for one in data.values()))
    for seed, picture in enumerate(pictures):
        assert picture.tobytes() == noise(seed, (400, 300)).convert("RGB").tobytes()
    await until_idle()
    assert psutil.Process().num_fds() <= num_open


async def test_random_ends_leave_the_pool_whole(pool: DecoderPool) -> None:
    """Cancelled, broken and slow pictures in all orders; then it decodes, and nothing else is left."""
    num_open = 0
    for round_ in range(12):
        tasks = [
            asyncio.create_task(decode(pool, data, size))
            for data, size in (
                (GOOD, (120, 90)),
                (GOOD[:-100], (120, 90)),
                (ENDLESS, (4000, 3000)),
                (GOOD, (120, 90)),
            )
        ]
        await asyncio.sleep(0.004 * round_)
        for task in tasks[round_ % 4 :]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(r, Image.Image | ServeError | asyncio.CancelledError) for r in results), results
        num_open = num_open or psutil.Process().num_fds()
    assert (await decode(pool)).size == (120, 90)
    await until_idle()
    assert psutil.Process().num_fds() <= num_open


PROGRAM = """
import asyncio, sys
from places import FakePlace
from epd_serve.media.decoder_pool import DecoderPool
from epd_serve.media.picture import MediaLimits

async def main():
    pool = DecoderPool(cpu_s=60, limits=MediaLimits(max_pixels=1 << 28, max_bytes=1 << 30))
    async with pool.decoded(sys.stdin.buffer.read(), (4000, 3000), FakePlace()):
        pass

asyncio.run(main())
"""


async def test_nothing_outlives_an_instance_that_is_killed() -> None:
    path = os.pathsep.join(sys.path)
    with subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    ) as program:
        assert program.stdin is not None
        program.stdin.write(ENDLESS)
        program.stdin.close()
        async with asyncio.timeout(60):
            while len(family := psutil.Process(program.pid).children(recursive=True)) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        program.kill()
        await asyncio.to_thread(psutil.wait_procs, family, 60)
        assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in family)


async def test_decoders_inherit_no_secret(patient_pool: DecoderPool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "EPD_SERVE_CLUSTER_KEY", "OWN_CLUSTER_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "a-secret-of-this-deployment")
    patient_pool.start()
    async with patient_pool.decoded(saved(Image.new("RGB", (8, 8)), "PNG"), (8, 8), FakePlace()):
        children = psutil.Process().children(recursive=True)
        decoders = [one for one in children if one.status() != psutil.STATUS_ZOMBIE]
        assert decoders, "the one that forks the others"
        assert not any("a-secret-of-this-deployment" in one.environ().values() for one in decoders)


@pytest.mark.parametrize("is_low", [False, True])
async def test_the_pixels_decoded_at_once_are_bounded(patient_pool: DecoderPool, is_low: bool) -> None:
    size = (4096, 4096)  # two of them have 32 Mpx
    data = saved(Image.new("RGB", size, "teal"), "PNG")
    shown = (512, 512) if is_low else size
    begun: asyncio.Queue[int] = asyncio.Queue()

    async def decode(number: int, leave: asyncio.Event) -> None:
        async with patient_pool.decoded(data, shown, FakePlace(), low_detail=is_low):
            begun.put_nowait(number)
            await leave.wait()

    leaving = [asyncio.Event() for _ in range(4)]
    tasks = [asyncio.create_task(decode(number, leave)) for number, leave in enumerate(leaving)]
    assert {await begun.get(), await begun.get()} == {0, 1}
    async with patient_pool.decoded(saved(Image.new("RGB", (64, 64)), "PNG"), (64, 64), FakePlace()):
        assert begun.empty(), "small pictures wait for none of them, large ones do"
    tasks[2].cancel()
    await asyncio.wait({tasks[2]})
    leaving[0].set()
    await tasks[0]
    assert await begun.get() == 3
    for leave in leaving:
        leave.set()
    await asyncio.gather(tasks[1], tasks[3])
    async with AsyncExitStack() as stack:  # there is as much room as before
        for _ in range(2):
            await stack.enter_async_context(patient_pool.decoded(data, shown, FakePlace(), low_detail=is_low))


async def test_a_picture_with_more_pixels_than_that_is_decoded_alone(patient_pool: DecoderPool) -> None:
    size = (8192, 5000)
    data = saved(Image.new("RGB", size, "teal"), "PNG")
    async with asyncio.timeout(60), patient_pool.decoded(data, size, FakePlace()) as pixels:
        assert pixels.shape == (5000, 8192, 3)
