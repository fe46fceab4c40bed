"""Blocks that end when their time is over: all of them by one timer."""

import asyncio

import pytest

from proxy.dispatch.interruption import Deadline, Deadlines


class Late(Exception):
    pass


async def test_each_block_ends_at_its_own_time_and_no_other_does():
    loop = asyncio.get_running_loop()
    deadlines = Deadlines(0.2, Late)
    ended: list[tuple[int, float]] = []

    async def one(number: int) -> None:
        began_s = loop.time()
        with pytest.raises(Late), Deadline(loop, deadlines):
            await asyncio.Event().wait()
        ended.append((number, loop.time() - began_s))

    with Deadline(loop, deadlines):
        pass  # its timer must not end the next ones early
    tasks = []
    for number in range(3):
        await asyncio.sleep(0.05)
        tasks.append(asyncio.create_task(one(number)))
    await asyncio.gather(*tasks)
    assert [number for number, _ in ended] == [0, 1, 2]
    assert all(seconds > 0.19 for _, seconds in ended)
    with Deadline(loop, deadlines):  # the timer runs again where there was none left
        await asyncio.sleep(0)
    with pytest.raises(Late), Deadline(loop, deadlines):
        await asyncio.Event().wait()


async def test_a_cancellation_from_elsewhere_stays_one():
    deadlines = Deadlines(60.0, Late)

    async def wait() -> None:
        with Deadline(asyncio.get_running_loop(), deadlines):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
