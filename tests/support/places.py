"""A place in which a file is decoded (:class:`epd_serve.media.decoder_pool.Place`)."""

from __future__ import annotations

import asyncio

import psutil


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


def decoders() -> list[int]:
    """Return the pids of the processes that decode files for this one."""
    return [
        worker.pid
        for server in psutil.Process().children()
        if "epd_serve.media.decoder" in server.cmdline()
        for worker in server.children()
        if worker.status() != psutil.STATUS_ZOMBIE
    ]


async def until_idle() -> None:
    """Return when no file is being decoded."""
    async with asyncio.timeout(60):
        while decoders():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
