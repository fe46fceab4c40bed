"""A place in which a file is decoded (:class:`epd_serve.media.decoder_pool.Place`)."""

from __future__ import annotations

import asyncio

import psutil
from program import is_alive, until


class FakePlace:
    """A quick or slow place; a slow one is free once ``is_free`` is set."""

    def __init__(self, *, is_slow: bool = True) -> None:
        self.is_slow = is_slow
        self.asked = asyncio.Event()
        self.is_free = asyncio.Event()

    async def become_slow(self) -> None:
        assert not self.is_slow, "it is one"
        self.asked.set()
        await self.is_free.wait()
        self.is_slow = True


_others: set[int] = set()


def ignore_other_pools() -> None:
    """Leave the decoders of pools that are there now out of :func:`decoders`: of instances of other tests."""
    _others.clear()
    _others.update(server.pid for server in _servers())


def decoders() -> list[int]:
    """Return the pids of the processes that decode files for this one."""
    return [
        worker.pid
        for server in _servers()
        if server.pid not in _others
        for worker in server.children()
        if is_alive(worker)
    ]


def _servers() -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if "epd_serve.media.decoder" in one.cmdline()]


async def until_idle() -> None:
    """Return when no file is being decoded."""
    await until(lambda: not decoders(), 60)
