"""Work in order for each of several peers, none of which waits for another."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Work = TypeVar("Work")


class Lanes(Generic[Work]):
    """A thread for each lane that has work, or had some ``idle_s`` ago.

    ``handle`` does a piece of work and must not raise.
    """

    def __init__(self, name: str, handle: Callable[[Work], None], idle_s: float = 10.0) -> None:
        self._name = name
        self._handle = handle
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._queues: dict[str, queue.SimpleQueue[Work]] = {}

    def put(self, lane: str, work: Work) -> None:
        """It is done after all that was put into the same lane before. Returns at once."""
        with self._lock:
            waiting = self._queues.get(lane)
            if waiting is None:
                waiting = self._queues[lane] = queue.SimpleQueue()
                thread = threading.Thread(target=self._run, args=(lane, waiting), name=self._name, daemon=True)
                thread.start()
            waiting.put(work)

    @property
    def num_threads(self) -> int:
        with self._lock:
            return len(self._queues)

    def _run(self, lane: str, waiting: queue.SimpleQueue[Work]) -> None:
        while True:
            try:
                work = waiting.get(timeout=self._idle_s)
            except queue.Empty:
                with self._lock:
                    if waiting.empty():
                        del self._queues[lane]
                        return
            else:
                self._handle(work)
