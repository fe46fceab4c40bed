"""Threads for what would hold up the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class FairThreads:
    """A few threads, on which the askers take turns: nobody waits for more than one call of each other one."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._lock = Lock()
        self._calls: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}  # whose turn is next comes first

    async def run(self, asker: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function`` on a thread when its asker's turn comes; return or raise as it does."""
        future: Future[T] = Future()
        with self._lock:
            self._calls.setdefault(asker, deque()).append((future, lambda: function(*args, **kwargs)))
        self._threads.submit(self._run_next)
        return await asyncio.wrap_future(future)

    def _run_next(self) -> None:
        with self._lock:
            asker = next(iter(self._calls))
            calls = self._calls.pop(asker)
            future, call = calls.popleft()
            if calls:
                self._calls[asker] = calls
        if not future.set_running_or_notify_cancel():  # who asked has left
            return
        try:
            future.set_result(call())
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            future.set_exception(error)
