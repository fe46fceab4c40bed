"""Places for work that takes them in turns: short before long, within bounds, and none for those who have left."""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections.abc import Callable
from itertools import count

from epd_serve.errors import PREPARATION_FULL, Unavailable

#: An item is overtaken by shorter ones that come at most so many times its own length after it.
_PATIENCE = 4.0


class Turns:
    """A number of places, and the queue for them. It belongs to one event loop.

    Args:
        what: the work that is done in the places, for errors.
        max_waiting: longest queue; further requests are refused.
        timeout_s: longest wait.
    """

    def __init__(
        self,
        what: str,
        num_places: int,
        *,
        max_waiting: int,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.what = what
        self._num_free = num_places
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._clock = clock
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []  # when it is due, arrival, its turn
        self._numbers = count()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def take_free(self) -> bool:
        """Take a place if one is free."""
        if not self._num_free:
            return False
        self._num_free -= 1
        return True

    async def take(self, cost_s: float, timeout_s: float = math.inf) -> None:
        """Take a place when it is one's turn; :meth:`give_back` must follow.

        Args:
            cost_s: seconds, about, for which the place will be needed.
            timeout_s: how long this wait may be, where that is less than any may.

        Raises Unavailable where too many wait already, or for too long.
        """
        if len(self._waiting) >= self._max_waiting:
            raise Unavailable(
                f"{self._max_waiting} requests wait to have their {self.what} prepared; try again later",
                code=PREPARATION_FULL,
            )
        if self.take_free():
            return
        timeout_s = min(timeout_s, self._timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await self._wait(self._clock() + _PATIENCE * cost_s)
        except TimeoutError as error:
            raise Unavailable(
                f"no place was free to prepare the request's {self.what} within {timeout_s:g} s; try again later",
                code=PREPARATION_FULL,
            ) from error

    def give_back(self) -> None:
        while self._waiting:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1

    async def _wait(self, due: float) -> None:
        entry = (due, next(self._numbers), asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiting, entry)
        try:
            await entry[2]
        except BaseException:
            if entry in self._waiting:
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)
            elif entry[2].done() and not entry[2].cancelled():
                self.give_back()  # it was its turn in the same moment
            raise
