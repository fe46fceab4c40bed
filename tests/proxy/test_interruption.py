"""Blocks that end when their time is over, or when other code says so."""

import asyncio

import pytest

from proxy.http.interruption import Interruption


class Late(Exception):
    pass


async def test_each_block_ends_at_its_own_time_and_no_other_does():
    loop = asyncio.get_running_loop()
    ended: list[tuple[int, float]] = []

    async def one(number: int) -> None:
        began_s = loop.time()
        with pytest.raises(Late), Interruption(loop, 0.2, Late):
            await asyncio.Event().wait()
        ended.append((number, loop.time() - began_s))

    with Interruption(loop, 0.01, Late):
        pass  # its timer must not end what follows
    tasks = []
    for number in range(3):
        await asyncio.sleep(0.05)
        tasks.append(asyncio.create_task(one(number)))
    await asyncio.gather(*tasks)
    assert [number for number, _ in ended] == [0, 1, 2]
    assert all(seconds > 0.19 for _, seconds in ended)


async def test_the_first_reason_ends_the_block():
    loop = asyncio.get_running_loop()
    with pytest.raises(Late, match="first"), Interruption(loop, 60.0, Late) as interruption:
        loop.call_soon(interruption.fire, Late("first"))
        loop.call_soon(interruption.fire, Late("second"))
        await asyncio.Event().wait()


async def test_a_cancellation_from_elsewhere_stays_one():
    async def wait() -> None:
        with Interruption(asyncio.get_running_loop(), 60.0, Late):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
