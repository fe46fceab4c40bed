"""What decoder processes inherit, and the pixels of the pictures that are decoded at once."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace

import psutil
import pytest
from pictures import LIMITS
from PIL import Image
from places import FakePlace

from epd_serve.media.decoder_pool import DecoderPool


@pytest.fixture
async def pool() -> AsyncIterator[DecoderPool]:
    pool = DecoderPool(cpu_s=60.0, limits=replace(LIMITS, max_pixels=1 << 28, max_bytes=1 << 28))
    yield pool
    pool.close()


def picture(size: tuple[int, int], kind: str = "WEBP") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, "teal").save(file, kind)
    return file.getvalue()


async def test_decoders_inherit_no_secret(pool: DecoderPool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "EPD_SERVE_CLUSTER_KEY", "OWN_CLUSTER_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "a-secret-of-this-deployment")
    pool.start()
    async with pool.decoded(picture((8, 8)), (8, 8), FakePlace()):
        children = psutil.Process().children(recursive=True)
        decoders = [one for one in children if one.status() != psutil.STATUS_ZOMBIE]
        assert decoders, "the one that forks the others"
        assert not any("a-secret-of-this-deployment" in one.environ().values() for one in decoders)


@pytest.mark.parametrize("is_low", [False, True])
async def test_the_pixels_decoded_at_once_are_bounded(pool: DecoderPool, is_low: bool) -> None:
    size, kind = (4096, 4096), "PNG"  # two of them have 32 Mpx
    data = picture(size, kind)
    shown = (512, 512) if is_low else size
    begun: asyncio.Queue[int] = asyncio.Queue()

    async def decode(number: int, leave: asyncio.Event) -> None:
        async with pool.decoded(data, shown, FakePlace(), low_detail=is_low):
            begun.put_nowait(number)
            await leave.wait()

    leaving = [asyncio.Event() for _ in range(4)]
    tasks = [asyncio.create_task(decode(number, leave)) for number, leave in enumerate(leaving)]
    assert {await begun.get(), await begun.get()} == {0, 1}
    async with pool.decoded(picture((64, 64)), (64, 64), FakePlace()):
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
            await stack.enter_async_context(pool.decoded(data, shown, FakePlace(), low_detail=is_low))


async def test_a_picture_with_more_pixels_than_that_is_decoded_alone(pool: DecoderPool) -> None:
    size = (8192, 5000)
    data = picture(size, "PNG")
    async with asyncio.timeout(60), pool.decoded(data, size, FakePlace()) as pixels:
        assert pixels.shape == (5000, 8192, 3)
