"""Ending what a task does, for a reason that is found outside of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

import msgspec


class Interruption(msgspec.Struct, eq=False):
    """A block that other code can end with an exception of its choice, by :meth:`fire`.

    As in ``asyncio.timeout``, the task is cancelled, and the cancellation leaves the block as the reason. A
    cancellation from elsewhere stays one.

    Args:
        loop: the running one: asyncio would look it up with a system call each time (CPython 3.11).
        seconds: after which the block ends with what ``late`` makes; None: no limit.
    """

    loop: asyncio.AbstractEventLoop
    seconds: float | None = None
    late: Callable[[], Exception] = TimeoutError
    _timer: asyncio.TimerHandle | None = None
    _task: asyncio.Task[object] | None = None
    _reason: Exception | None = None
    _num_cancels: int = 0

    def fire(self, reason: Exception) -> None:
        """Raise ``reason`` out of the block; only the first counts, and only while the block runs.

        Code of the block itself finds out by other means: a task that cancels itself is cancelled at its next
        await, which may be outside of the block.
        """
        if self._task not in (None, asyncio.current_task(self.loop)) and self._reason is None:
            self._reason = reason
            assert self._task is not None
            self._task.cancel()

    def _run_out(self) -> None:
        self.fire(self.late())

    def __enter__(self) -> Self:
        self._task = asyncio.current_task(self.loop)
        assert self._task is not None
        self._num_cancels = self._task.cancelling()
        if self.seconds is not None:
            self._timer = self.loop.call_later(self.seconds, self._run_out)
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
