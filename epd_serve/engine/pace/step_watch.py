"""The watchdog of an instance's steps and encodes: it tells one that hangs from one that takes long."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

#: A step hangs when it takes this many times as long as measured steps of its kind, and at least so many seconds:
#: a machine that swaps, or a device that others use too, is slower by far than it was, and lives.
FACTOR = 20.0
LEAST_S = 60.0
#: Between two looks no more is counted: a process that was stopped has not computed meanwhile.
_MOST_BETWEEN_LOOKS_S = 1.0
_SMOOTHING = 0.3


class StepWatch:
    """Measures the steps of one thread, and judges the one in progress by them.

    The first step of its kind is not predicted, as it may compile for minutes: it is never taken for hung.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._mean_s: dict[Hashable, float] = {}
        self._step: tuple[object, float | None] | None = None  # the one in progress, and the seconds of its kind
        self._seen: tuple[object, float | None] | None = None
        self._seen_s = 0.0
        self._looked_s = clock()

    @contextmanager
    def step(self, kind: Hashable) -> Iterator[None]:
        """A context in which a step is computed, on the thread of the steps.

        Args:
            kind: steps of one kind take about as long as each other.
        """
        began_s, mean_s = self._clock(), self._mean_s.get(kind)
        self._step = object(), mean_s
        try:
            yield
        finally:
            self._step = None
        seconds = self._clock() - began_s
        self._mean_s[kind] = seconds if mean_s is None else mean_s + _SMOOTHING * (seconds - mean_s)

    def overdue(self) -> str | None:
        """Return a sentence on the step in progress where it hangs, else None; to be called once a second or more
        often, by one thread."""
        now = self._clock()
        passed_s, self._looked_s = min(now - self._looked_s, _MOST_BETWEEN_LOOKS_S), now
        step = self._step
        if step is None or step is not self._seen:
            self._seen, self._seen_s = step, 0.0
            return None
        self._seen_s += passed_s
        _, usual_s = step
        if usual_s is None or self._seen_s < max(FACTOR * usual_s, LEAST_S):
            return None
        return f"it has computed for {self._seen_s:.0f} s, and {usual_s:.2g} s are usual"
