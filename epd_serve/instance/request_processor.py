"""Tokenising and image preprocessing on a few threads, apart from step and event loop (TriInfer section 4.1)."""

from __future__ import annotations

import asyncio
import heapq
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Literal, ParamSpec, TypeVar

from epd_serve.errors import PREPARATION_FULL, Unavailable

P = ParamSpec("P")
T = TypeVar("T")
Kind = Literal["text", "media"]

#: Estimates, in seconds: for the order in which items get their turn, nothing more.
S_PER_PIXEL = 5e-8
S_PER_CHARACTER = 1e-6
_MAX_MEDIA_THREADS = 8
#: An item is overtaken by shorter ones that come at most so many times its own length after it.
_PATIENCE = 4.0


def num_media_threads(compute_threads: int | None) -> int:
    """As many as compute, or half the cores where that is left to the library; a few at most."""
    return min(compute_threads or max(1, len(os.sched_getaffinity(0)) // 2), _MAX_MEDIA_THREADS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Preparation:
    """One item's way through the processor; times in seconds of its clock. ``thread`` names who did it."""

    kind: Kind
    thread: str
    queued_at: float
    started_at: float
    ended_at: float


class RequestProcessor:
    """Prepares prompts and media on threads of their own, so that no text waits behind a large image.

    An item that waits and is cancelled frees its place and is not processed. Shorter items overtake longer ones,
    within bounds, so that none waits for ever.

    Args:
        num_threads: for media; text has one.
        max_waiting: items of one kind that may wait; more are refused.
        queue_timeout_s, media_timeout_s: how long text and media may wait for their turn.
        observe: told of each item that was processed, on its thread.
    """

    def __init__(
        self,
        num_threads: int,
        *,
        queue_timeout_s: float,
        media_timeout_s: float | None = None,
        max_waiting: int = 4096,
        clock: Callable[[], float] = time.monotonic,
        observe: Callable[[Preparation], None] = lambda preparation: None,
    ) -> None:
        self._lanes: dict[Kind, _Lane] = {"text": _Lane("text", 1), "media": _Lane("media", num_threads)}
        media_s = queue_timeout_s if media_timeout_s is None else media_timeout_s
        self._timeout_s: dict[Kind, float] = {"text": queue_timeout_s, "media": media_s}
        self._max_waiting = max_waiting
        self._clock = clock
        self._observe = observe

    @property
    def num_waiting(self) -> int:
        return sum(len(lane.waiting) for lane in self._lanes.values())

    async def run(
        self, kind: Kind, cost_s: float, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """What ``function`` returns or raises, on a thread, when it is its turn.

        Args:
            cost_s: about how long it takes.

        Raises Unavailable where too many wait already, or for too long.
        """
        lane, timeout_s = self._lanes[kind], self._timeout_s[kind]
        loop, queued_at = asyncio.get_running_loop(), self._clock()
        if len(lane.waiting) >= self._max_waiting:
            raise Unavailable(
                f"{self._max_waiting} requests wait to have their {kind} prepared; try again later",
                code=PREPARATION_FULL,
            )
        try:
            async with asyncio.timeout(timeout_s):
                await lane.turn(queued_at + _PATIENCE * cost_s)
        except TimeoutError as error:
            raise Unavailable(
                f"no thread was free to prepare the request's {kind} within {timeout_s:g} s; try again later",
                code=PREPARATION_FULL,
            ) from error

        def work() -> T:
            started_at = self._clock()
            try:
                return function(*args, **kwargs)
            finally:
                thread = threading.current_thread().name
                self._observe(
                    Preparation(
                        kind=kind,
                        thread=thread,
                        queued_at=queued_at,
                        started_at=started_at,
                        ended_at=self._clock(),
                    )
                )

        # the place is free when the thread is, not when nobody waits for it any more
        future = lane.threads.submit(work)
        future.add_done_callback(lambda _: None if loop.is_closed() else loop.call_soon_threadsafe(lane.give_back))
        return await asyncio.wrap_future(future)

    async def close(self) -> None:
        """Return when no thread is at work any more."""
        for lane in self._lanes.values():
            await asyncio.to_thread(lane.threads.shutdown, cancel_futures=True)


class _Lane:
    """Threads, and who waits for one of them: (when it is due, number of arrival, its turn)."""

    def __init__(self, name: str, num_threads: int) -> None:
        self.threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self.waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._num_free = num_threads
        self._numbers = count()

    async def turn(self, due: float) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        entry = (due, next(self._numbers), asyncio.get_running_loop().create_future())
        heapq.heappush(self.waiting, entry)
        try:
            await entry[2]
        except BaseException:
            if entry in self.waiting:
                self.waiting.remove(entry)
                heapq.heapify(self.waiting)
            elif entry[2].done() and not entry[2].cancelled():
                self.give_back()  # it was its turn in the same moment
            raise

    def give_back(self) -> None:
        while self.waiting:
            turn = heapq.heappop(self.waiting)[2]
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1
