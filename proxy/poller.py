"""Keeps the instance table current: asks every instance for its state, again and again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping

from epd_serve.backends.base import StageCalls
from epd_serve.errors import ServeError
from epd_serve.routing.table import InstanceTable

logger = logging.getLogger(__name__)


class Poller:
    """Polls every instance each ``interval_s``; requests wait for ``startup_wait_s`` while a deployment starts."""

    def __init__(
        self, table: InstanceTable, calls: Mapping[str, StageCalls], interval_s: float, startup_wait_s: float
    ) -> None:
        self._table = table
        self._calls = calls
        self._interval_s = interval_s
        self._startup_wait_s = startup_wait_s
        self._started = asyncio.Event()
        self._wake = {name: asyncio.Event() for name in calls}

    def report_lost(self, name: str) -> None:
        """A connection to the instance failed: no work for it until it answers again; it is asked at once."""
        self._table.mark_lost(name)
        self._wake[name].set()

    async def started(self) -> None:
        """Wait until the deployment can serve, or has had its time to start.

        A request that comes before is queued rather than refused: load testers give up after a refused warm-up.
        """
        await self._started.wait()

    async def run(self) -> None:
        """Until cancelled; a slow instance delays no other."""
        asyncio.get_running_loop().call_later(self._startup_wait_s, self._started.set)
        async with asyncio.TaskGroup() as group:
            for name in self._calls:
                group.create_task(self._watch(name))

    async def _watch(self, name: str) -> None:
        while True:
            self._wake[name].clear()  # before the question: what is reported during it is asked about again
            await self._ask(name)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._wake[name].wait()

    async def _ask(self, name: str) -> None:
        record = self._table[name]
        was_ready = record.ready
        try:
            self._table.update(name, await self._calls[name].info())
        except (ServeError, ValueError) as error:
            self._table.mark_lost(name)
            if was_ready:
                logger.warning("instance %s lost: %s", name, error)
        else:
            if not self._table.missing_stages() or all(one.info is not None for one in self._table):
                self._started.set()
            if record.ready and not was_ready:
                logger.info("instance %s (%s) is ready at %s", name, record.role, record.url)
