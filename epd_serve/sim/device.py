"""A virtual clock, and a device whose concurrent activities slow each other down."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial
from itertools import count

from device.emulated.timeline import Running, rates


class Clock:
    """A heap of events; simultaneous ones run in the order of their scheduling."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, seconds: float, run: Callable[[], None]) -> None:
        """Call ``run`` at a time, or now if it has passed."""
        heapq.heappush(self._events, (max(seconds, self.now), next(self._numbers), run))

    def after(self, seconds: float, run: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), run))

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def run(self, until: Callable[[], bool]) -> None:
        """Run events until a condition holds."""
        while not until():
            self.now, _, run = heapq.heappop(self._events)
            self.num_events += 1
            run()


class Activity(Running, eq=False, kw_only=True):
    """A running step or encode batch; ``version``: how often its end was scheduled; only the last one counts."""

    on_end: Callable[[], None]
    rate: float = 1.0
    since_s: float = 0.0
    version: int = 0


class SimDevice:
    """One device, or one machine's CPU.

    Its activities slow each other down as operations of an emulated device do, see :func:`rates`: memory-bound and
    compute-bound stages overlap well (EPD-Serve, section 3.5).
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._active: list[Activity] = []

    def start(self, activity: Activity) -> None:
        """Begin an activity; its ``on_end`` is called at the end."""
        self._active.append(activity)
        activity.since_s = self._clock.now
        self._share()

    def _share(self) -> None:
        now_s = self._clock.now
        speeds = rates(self._active) if len(self._active) > 1 else [1.0]  # alone at full speed
        for one, rate in zip(self._active, speeds, strict=False):
            if rate != one.rate or not one.version:
                one.left_s = max(one.left_s - (now_s - one.since_s) * one.rate, 0.0)
                one.since_s, one.rate = now_s, rate
                one.version += 1
                self._clock.after(one.left_s / rate, partial(self._end, one, one.version))

    def _end(self, activity: Activity, version: int) -> None:
        if activity.version == version:  # else another end is scheduled
            self._active.remove(activity)
            self._share()
            activity.on_end()
