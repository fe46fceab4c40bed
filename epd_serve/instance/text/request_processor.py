"""Tokenising and media preprocessing on a few threads, apart from step and event loop (TriInfer section 4.1)."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Literal, ParamSpec, TypeVar

from device.present import num_cores
from epd_serve.errors import PREPARATION_FULL, Overloaded
from epd_serve.telemetry.span import Span, Value

P = ParamSpec("P")
T = TypeVar("T")
Kind = Literal["text", "media", "grammar"]

#: Estimates, in seconds, that tell quick items from slow ones.
S_PER_PIXEL = 5e-8
S_PER_CHARACTER = 1e-6
#: Items that take longer are prepared in the slow places.
SLOW_S = 0.1
_MAX_MEDIA_THREADS = 8
#: Processes compile grammars first, so that their places are more than there are cores.
_TEXT_PLACES, _GRAMMAR_PLACES, _MIN_SLOW_MEDIA = (1, 1), (2, 4), 2


def num_media_threads(compute_threads: int | None) -> int:
    """As many as compute, or half the cores where that is left to the library; a few at most."""
    return min(compute_threads or max(1, num_cores() // 2), _MAX_MEDIA_THREADS)


class RequestProcessor:
    """Prepares prompts, media and grammars on threads, each kind in quick places and in slow ones.

    A slow item holds up no quick one, and no kind another. Items of one kind of place are served in order.

    Args:
        num_threads: for quick media.
        queue_timeout_s: the longest wait of an item for a place.
        put: takes a span for each item that was processed.
    """

    def __init__(
        self, num_threads: int, *, queue_timeout_s: float, put: Callable[[Span], None] = lambda span: None
    ) -> None:
        places = {
            "text": _TEXT_PLACES,
            "media": (num_threads, max(num_threads, _MIN_SLOW_MEDIA)),
            "grammar": _GRAMMAR_PLACES,
        }
        self._lanes = {
            (kind, is_slow): _Lane(f"{kind} slow" if is_slow else kind, number)
            for kind, numbers in places.items()
            for is_slow, number in zip((False, True), numbers, strict=True)
        }
        self._queue_timeout_s = queue_timeout_s
        self._put = put

    @property
    def num_waiting(self) -> int:
        return sum(lane.num_waiting for lane in self._lanes.values())

    async def run(
        self, kind: Kind, cost_s: float, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call ``function`` on a thread, when a place is free; return or raise what it does.

        ``cost_s``: about how long it takes. Raises Overloaded where no place is free in time.
        """
        async with self.place(kind, cost_s) as place:
            return await place.run(function, *args, **kwargs)

    @asynccontextmanager
    async def place(self, kind: Kind, cost_s: float, timeout_s: float = math.inf) -> AsyncGenerator[Place]:
        """Take a place for work of several parts.

        ``timeout_s``: the longest wait, where that is less than ``queue_timeout_s``. Raises as :meth:`run`.
        """
        queued_s = time.monotonic()
        place = Place(self._lanes, kind, min(timeout_s, self._queue_timeout_s))
        await place.take(is_slow=cost_s > SLOW_S)
        start_s = time.monotonic()
        about: dict[str, Value] = {"track": place.name, "waited_s": start_s - queued_s}
        try:
            yield place
        finally:
            place.leave()
            self._put(Span(kind, "", start_s, time.monotonic(), about))

    async def close(self) -> None:
        """Return when all threads have ended."""
        for lane in self._lanes.values():
            await asyncio.to_thread(lane.threads.shutdown, cancel_futures=True)


class _Lane:
    """Places of one kind, by name, and a thread for each."""

    def __init__(self, name: str, num_places: int) -> None:
        self.free: asyncio.PriorityQueue[str] = asyncio.PriorityQueue()
        for number in range(num_places):
            self.free.put_nowait(f"{name}_{number}")
        self.threads = ThreadPoolExecutor(num_places, thread_name_prefix=name)
        self.num_waiting = 0


class Place:
    """A place for the work of one item.

    Attributes:
        name: for traces; "" while it has none.
        is_slow: whether it is one of the slow ones.
    """

    def __init__(self, lanes: dict[tuple[str, bool], _Lane], kind: Kind, timeout_s: float) -> None:
        self._lanes = lanes
        self._kind = kind
        self._timeout_s = timeout_s
        self.name = ""
        self.is_slow = False

    @property
    def _lane(self) -> _Lane:
        return self._lanes[self._kind, self.is_slow]

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``function`` on a thread; return or raise what it does.

        The thread ends its work even where the call is cancelled; the next one in this place waits for it.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._lane.threads, lambda: function(*args, **kwargs))

    async def become_slow(self) -> None:
        """Leave a quick place, and return with a slow one. Raises Overloaded."""
        self.leave()
        await self.take(is_slow=True)

    async def take(self, *, is_slow: bool) -> None:
        """Wait for a place. Raises Overloaded."""
        self.is_slow = is_slow
        lane = self._lane
        lane.num_waiting += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                self.name = await lane.free.get()
        except TimeoutError as error:
            raise Overloaded(
                f"no place was free to prepare the request's {self._kind} within {self._timeout_s:g} s; try again "
                "later",
                code=PREPARATION_FULL,
            ) from error
        finally:
            lane.num_waiting -= 1

    def leave(self) -> None:
        """Give the place to the next item."""
        if self.name:
            self._lane.free.put_nowait(self.name)
            self.name = ""
