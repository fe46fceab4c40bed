"""Looks at the gateway's language queue (epd_serve/flow/stealing.py) for as long as it is long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from epd_serve.flow.events import Event, Stolen
from epd_serve.flow.stealing import Run, StealQueue, StealRule
from epd_serve.routing.table import InstanceTable

#: HeteroServe, algorithm 1: between two looks at a queue that is long enough.
_IDLE_S = 0.01


class Told(Run, Protocol):
    """A request that can be told that it is stolen."""

    def feed(self, event: Event) -> None: ...


R = TypeVar("R", bound=Told)


class Stealing(StealQueue[R]):
    """Requests of one gateway. They call :meth:`see` and :meth:`ended`, which wake up :meth:`run`."""

    def __init__(
        self, table: InstanceTable, rule: StealRule, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(table, rule)
        self._clock = clock
        self._look = asyncio.Event()

    def see(self, run: R) -> None:
        super().see(run)
        self._wake()

    def ended(self, run: R) -> None:
        super().ended(run)
        self._wake()

    def _wake(self) -> None:
        """Wake thieves; where the queue is too short for them, nothing happens."""
        if self.is_long:
            self._look.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._look.wait()
            for run, thief in self.take(self._clock()):
                run.feed(Stolen(thief))
            if not self.is_long and self.thieves.collect_until_s(self._clock()) is None:
                self._look.clear()
            await asyncio.sleep(_IDLE_S)
