"""Tokenization and media preprocessing on threads apart from steps and event loop (TriInfer section 4.1)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, ParamSpec, TypeVar

from device.present import num_cores
from epd_serve.engine.telemetry import Kind
from epd_serve.errors import PREPARATION_FULL, Overloaded
from epd_serve.telemetry.span import Span, SpanStream, Value

P = ParamSpec("P")
T = TypeVar("T")

#: Estimated seconds of preparation, to separate quick items from slow ones.
S_PER_PIXEL = 5e-8
S_PER_CHARACTER = 1e-6
#: Items estimated to take longer use slow places.
SLOW_S = 0.1
_MAX_MEDIA_THREADS = 8


def num_media_threads(compute_threads: int | None) -> int:
    """Return the number of media threads: that of compute threads (default: half the cores), up to a limit."""
    return min(compute_threads or max(1, num_cores() // 2), _MAX_MEDIA_THREADS)


class RequestProcessor:
    """Prepares prompts, media and grammars: an executor per kind, with places for quick and for slow items.

    An executor has one thread per place, so slow items do not delay quick ones, and kinds do not delay each other.
    Items are served in order.

    Attributes:
        num_waiting: number of items that wait for a place.
        free: names of free places, by kind and slowness.
    """

    def __init__(self, num_threads: int, *, queue_timeout_s: float, spans: SpanStream) -> None:
        # grammars compile in processes first, so their places may exceed the cores
        numbers = {"text": (1, 1), "media": (num_threads, max(num_threads, 2)), "grammar": (2, 4)}
        self.executors = {
            kind: ThreadPoolExecutor(quick + slow, thread_name_prefix=kind)
            for kind, (quick, slow) in numbers.items()
        }
        self.free: dict[tuple[str, bool], asyncio.PriorityQueue[str]] = {}
        for kind, (quick, slow) in numbers.items():
            for is_slow, number in ((False, quick), (True, slow)):
                queue = self.free[kind, is_slow] = asyncio.PriorityQueue()
                for i in range(number):
                    queue.put_nowait(f"{kind}{' slow' if is_slow else ''}_{i}")
        self.num_waiting = 0
        self._queue_timeout_s = queue_timeout_s
        self._spans = spans

    async def run(
        self, kind: Kind, cost_s: float, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call ``function`` on a thread once a place is free, and return its result.

        ``cost_s`` is its estimated duration. Raises Overloaded if no place is free in time.
        """
        async with self.place(kind, cost_s) as place:
            return await place.run(function, *args, **kwargs)

    @asynccontextmanager
    async def place(self, kind: Kind, cost_s: float) -> AsyncGenerator[Place]:
        """Take a place for work in several parts. Raises like :meth:`run`."""
        queued_s = time.monotonic()
        place = Place(self, kind, self._queue_timeout_s)
        await place.take(is_slow=cost_s > SLOW_S)
        start_s = time.monotonic()
        about: dict[str, Value] = {"track": place.name, "waited_s": start_s - queued_s}
        try:
            yield place
        finally:
            place.leave()
            self._spans.put(Span(kind, "", start_s, time.monotonic(), about))

    async def close(self) -> None:
        """Wait for all threads to end."""
        for threads in self.executors.values():
            await asyncio.to_thread(threads.shutdown, cancel_futures=True)


class Place:
    """A place for the work of one item. ``name``: for traces; "" while no place is taken."""

    def __init__(self, processor: RequestProcessor, kind: Kind, timeout_s: float) -> None:
        self._processor = processor
        self._kind = kind
        self._timeout_s = timeout_s
        self._work: asyncio.Future[Any] | None = None
        self.name = ""
        self.is_slow = False

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``function`` on a thread and return its result.

        If the call is cancelled, the thread still finishes, and only then is the place free.
        """
        executor = self._processor.executors[self._kind]
        call = partial(function, *args, **kwargs)
        work = self._work = asyncio.get_running_loop().run_in_executor(executor, call)
        return await asyncio.shield(work)

    async def become_slow(self) -> None:
        """Exchange a quick place for a slow one. Raises Overloaded."""
        self.leave()
        await self.take(is_slow=True)

    async def take(self, *, is_slow: bool) -> None:
        """Wait for a place. Raises Overloaded."""
        self.is_slow = is_slow
        self._processor.num_waiting += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                self.name = await self._processor.free[self._kind, is_slow].get()
        except TimeoutError as error:
            raise Overloaded(
                f"no place was free to prepare the request's {self._kind} within {self._timeout_s:g} s; try again "
                "later",
                code=PREPARATION_FULL,
            ) from error
        finally:
            self._processor.num_waiting -= 1

    def leave(self) -> None:
        """Free the place once its thread has finished."""
        if self.name:
            give_back = partial(self._processor.free[self._kind, self.is_slow].put_nowait, self.name)
            self.name = ""
            if self._work is None or self._work.done():
                give_back()
            else:
                self._work.add_done_callback(lambda _: give_back())
