"""Run coroutines at once, and interrupt a task with an exception from outside."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Coroutine, Iterable
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

T = TypeVar("T")


async def run_all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines at once and return their results. The first exception cancels the others and is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def drop_tracebacks(error: BaseException | None) -> None:
    """Drop the tracebacks of an exception and its causes, and the local variables of their ended frames.

    They form reference cycles that hold a failed request's media, and the gateway seldom collects garbage.
    """
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


class Interruption(msgspec.Struct, eq=False):
    """A block that other code can end with an exception, by :meth:`fire`.

    As in ``asyncio.timeout``, the task is cancelled, and the block turns the cancellation into the exception. Any
    other cancellation passes through.

    Args:
        loop: the running loop; looking it up costs a system call each time (CPython 3.11).
        seconds: time limit, after which the block ends with ``late()``; None: no limit.
    """

    loop: asyncio.AbstractEventLoop
    seconds: float | None = None
    late: Callable[[], Exception] = TimeoutError
    _timer: asyncio.TimerHandle | None = None
    _task: asyncio.Task[object] | None = None
    _reason: Exception | None = None
    _num_cancels: int = 0

    def fire(self, reason: Exception) -> None:
        """Raise ``reason`` out of the block if it runs; only the first counts.

        Code inside the block cannot fire: its task would be cancelled at its next await, perhaps after the block.
        """
        if self._task not in (None, asyncio.current_task(self.loop)) and self._reason is None:
            self._reason = reason
            assert self._task is not None
            self._task.cancel()

    def __enter__(self) -> Self:
        self._task = asyncio.current_task(self.loop)
        assert self._task is not None
        self._num_cancels = self._task.cancelling()
        if self.seconds is not None:
            self._timer = self.loop.call_later(self.seconds, lambda: self.fire(self.late()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        task, self._task = self._task, None
        reason, self._reason = self._reason, None
        assert task is not None
        if (
            reason is not None
            and task.uncancel() <= self._num_cancels
            and kind is not None
            and issubclass(kind, asyncio.CancelledError)
        ):
            raise reason from error
