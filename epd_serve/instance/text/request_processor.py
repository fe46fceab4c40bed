"""Tokenising and image preprocessing on a few threads, apart from step and event loop (TriInfer section 4.1)."""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Literal, ParamSpec, TypeVar

from device.present import num_cores
from epd_serve.errors import PREPARATION_FULL, Overloaded
from epd_serve.telemetry.span import Span, Value


class Places:
    """A number of places for work, given out first come, first served. They belong to one event loop.

    Args:
        what: the work that is done in the places, for errors.
        max_waiting: longest queue; further requests are refused.
        timeout_s: longest wait.
    """

    def __init__(self, what: str, num_places: int, *, max_waiting: int, timeout_s: float) -> None:
        self._what = what
        self._num_free = num_places
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def take_free(self) -> bool:
        """Take a place if one is free."""
        if not self._num_free:
            return False
        self._num_free -= 1
        return True

    async def take(self, timeout_s: float = math.inf) -> None:
        """Take a place as soon as there is one; :meth:`give_back` must follow.

        Args:
            timeout_s: how long this wait may be, where that is less than any may.

        Raises Overloaded where too many wait already, or for too long.
        """
        if len(self._waiting) >= self._max_waiting:
            raise Overloaded(
                f"{self._max_waiting} requests wait to have their {self._what} prepared; try again later",
                code=PREPARATION_FULL,
            )
        if self.take_free():
            return
        timeout_s = min(timeout_s, self._timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await self._wait()
        except TimeoutError as error:
            raise Overloaded(
                f"no place was free to prepare the request's {self._what} within {timeout_s:g} s; try again later",
                code=PREPARATION_FULL,
            ) from error

    def give_back(self) -> None:
        while self._waiting:
            granted = self._waiting.popleft()
            if not granted.done():
                granted.set_result(None)
                return
        self._num_free += 1

    async def _wait(self) -> None:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(granted)
        try:
            await granted
        except BaseException:
            if granted in self._waiting:
                self._waiting.remove(granted)
            elif granted.done() and not granted.cancelled():
                self.give_back()  # it was granted in the same moment
            raise


P = ParamSpec("P")
T = TypeVar("T")
Kind = Literal["text", "media", "grammar"]

#: Estimates, in seconds, that tell long items from short ones.
S_PER_PIXEL = 5e-8
S_PER_CHARACTER = 1e-6
_MAX_MEDIA_THREADS = 8
#: What takes longer is done beside the others, in places of its own: seconds.
LONG_S = 0.1
#: Long prompts at once, and long media at least.
_TEXT_ASIDE, _MIN_MEDIA_ASIDE = 1, 2
#: Grammars at once: processes compile them first, so that these are more than there are cores.
_GRAMMAR_FIRST, _GRAMMAR_ASIDE = 2, 4


def num_media_threads(compute_threads: int | None) -> int:
    """As many as compute, or half the cores where that is left to the library; a few at most."""
    return min(compute_threads or max(1, num_cores() // 2), _MAX_MEDIA_THREADS)


class RequestProcessor:
    """Prepares prompts and media on threads of their own, so that no text waits behind a large image.

    First come, first served; an item that waits and is cancelled is not processed. Long items have places of their
    own, so that no short one waits for the end of a long one; one that turns out to be long steps aside.

    Args:
        num_threads: for media.
        max_waiting: items of one kind that may wait; more are refused.
        queue_timeout_s: how long an item may wait for a place.
        put: takes a span for each item that was processed.
    """

    def __init__(
        self,
        num_threads: int,
        *,
        queue_timeout_s: float,
        max_waiting: int = 4096,
        put: Callable[[Span], None] = lambda span: None,
    ) -> None:
        self._lanes: dict[Kind, _Lane] = {
            "text": _Lane("text", (1, _TEXT_ASIDE), queue_timeout_s, max_waiting),
            "media": _Lane(
                "media", (num_threads, max(num_threads, _MIN_MEDIA_ASIDE)), queue_timeout_s, max_waiting
            ),
            "grammar": _Lane("grammar", (_GRAMMAR_FIRST, _GRAMMAR_ASIDE), queue_timeout_s, max_waiting),
        }
        self._put = put

    @property
    def num_waiting(self) -> int:
        return sum(lane.first.num_waiting + lane.aside.num_waiting for lane in self._lanes.values())

    async def run(
        self, kind: Kind, cost_s: float, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call ``function`` on a thread, when a place is free; return or raise what it does.

        Args:
            cost_s: about how long it takes.

        Raises Overloaded where too many wait already, or for too long.
        """
        async with self.place(kind, cost_s) as place:
            return await place.run(function, *args, **kwargs)

    @asynccontextmanager
    async def place(self, kind: Kind, cost_s: float, timeout_s: float = math.inf) -> AsyncGenerator[Place]:
        """A place of that kind, for work of several parts. Raises as :meth:`run`.

        Args:
            timeout_s: how long the wait may be, where that is less than ``queue_timeout_s``.
        """
        lane, queued_at = self._lanes[kind], time.monotonic()
        places = lane.aside if cost_s > LONG_S else lane.first
        await places.take(timeout_s)
        place, started_at = Place(lane, places, timeout_s), time.monotonic()
        try:
            yield place
        finally:
            place.leave()
            about: dict[str, Value] = {"track": place.name, "waited_s": started_at - queued_at}
            self._put(Span(kind, "", started_at, time.monotonic(), about))

    async def close(self) -> None:
        """Return when no thread is at work any more."""
        for lane in self._lanes.values():
            await asyncio.to_thread(lane.threads.shutdown, cancel_futures=True)


class _Lane:
    """Places for one kind of work, and a thread for each: for short items, and aside for long ones."""

    def __init__(
        self,
        name: str,
        num_places: tuple[int, int],
        timeout_s: float,
        max_waiting: int,
    ) -> None:
        self.first, self.aside = (
            Places(name, number, max_waiting=max_waiting, timeout_s=timeout_s) for number in num_places
        )
        self.threads = ThreadPoolExecutor(sum(num_places), thread_name_prefix=name)
        self.names = [f"{name}_{number}" for number in range(sum(num_places))]  # a heap


class Place:
    """A place for the work of one item, until that is done.

    Attributes:
        name: of the place, for traces.
    """

    def __init__(self, lane: _Lane, places: Places, timeout_s: float) -> None:
        self._lane = lane
        self._places: Places | None = places
        self._timeout_s = timeout_s
        self._num_running = 0
        self._is_left = False
        self.name = heapq.heappop(lane.names)

    @property
    def is_aside(self) -> bool:
        return self._places is self._lane.aside

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``function`` on a thread; return or raise what it does."""
        loop = asyncio.get_running_loop()
        # the place is free when the thread is, not when nobody waits for it any more
        self._num_running += 1
        future = self._lane.threads.submit(function, *args, **kwargs)
        future.add_done_callback(lambda _: None if loop.is_closed() else loop.call_soon_threadsafe(self._ended))
        return await asyncio.wrap_future(future)

    def check(self) -> None:
        """For a thread that works here: raises CancelledError once nobody waits for it any more."""
        if self._is_left:
            raise CancelledError

    def step_aside(self) -> bool:
        """Leave the place to others and go on beside them, if there is room."""
        if not self.is_aside and self._places is not None and self._lane.aside.take_free():
            self._places.give_back()
            self._places = self._lane.aside
        return self.is_aside

    async def wait_aside(self) -> None:
        """Leave the place to others, and return when there is room beside them. Raises Overloaded."""
        self._free()
        await self._lane.aside.take(self._timeout_s)
        self._places = self._lane.aside
        self.name = heapq.heappop(self._lane.names)

    def leave(self) -> None:
        """Leave the place once the last part is done that was begun."""
        self._is_left = True
        if not self._num_running:
            self._free()

    def _ended(self) -> None:
        self._num_running -= 1
        if self._is_left and not self._num_running:
            self._free()

    def _free(self) -> None:
        given, self._places = self._places, None
        if given is not None:
            heapq.heappush(self._lane.names, self.name)
            given.give_back()
