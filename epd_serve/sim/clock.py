"""Virtual seconds, and what happens when."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class Clock:
    """A heap of events. Those of one moment happen in the order in which they were asked for."""

    __slots__ = ("_events", "_numbers", "now", "num_events")

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, seconds: float, run: Callable[[], None]) -> None:
        """``seconds`` in the past mean now."""
        heapq.heappush(self._events, (max(seconds, self.now), next(self._numbers), run))

    def after(self, seconds: float, run: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), run))

    @property
    def has_events(self) -> bool:
        """Whether anything is to come."""
        return bool(self._events)

    def run(self, until: Callable[[], bool]) -> None:
        """Until it is so. Raises RuntimeError where nothing happens any more before that."""
        events = self._events
        while not until():
            if not events:
                raise RuntimeError(f"at {self.now:.3f} s nothing is left to happen")
            self.now, _, run = heapq.heappop(events)
            self.num_events += 1
            run()
