"""Watchdog of an instance's steps and encodes, which tells hanging from slow, and the end of a process."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from device.base import BareDevice, DeviceLost

logger = logging.getLogger(__name__)

#: A step hangs if it takes FACTOR times the mean of its kind and at least LEAST_S seconds: swapping, or sharing
#: the device, can slow down a healthy step by far.
FACTOR = 20.0
LEAST_S = 60.0
#: Most seconds counted between two checks, because a suspended process does not compute.
_MOST_BETWEEN_LOOKS_S = 1.0
_SMOOTHING = 0.3


class StepWatch:
    """Measures the steps of one thread and compares the running step with them.

    The first step of a kind may compile for minutes and never counts as hanging.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._mean_s: dict[Hashable, float] = {}
        self._step: tuple[object, float | None] | None = None  # the running step, and the mean of its kind
        self._seen: tuple[object, float | None] | None = None
        self._seen_s = 0.0
        self._looked_s = clock()

    @contextmanager
    def step(self, kind: Hashable) -> Iterator[None]:
        """Compute a step within this context. Steps of one ``kind`` take about the same time."""
        began_s, mean_s = self._clock(), self._mean_s.get(kind)
        self._step = object(), mean_s
        try:
            yield
        finally:
            self._step = None
        seconds = self._clock() - began_s
        self._mean_s[kind] = seconds if mean_s is None else mean_s + _SMOOTHING * (seconds - mean_s)

    def overdue(self) -> str | None:
        """Return a sentence about the running step if it hangs, otherwise None.

        Call it at least once a second, from one thread.
        """
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
        return f"it has run for {self._seen_s:.0f} s; {usual_s:.2g} s is usual"


def end_process() -> None:
    """End this process at once after a fatal error; its supervisor restarts it."""
    logging.shutdown()
    os._exit(1)


def end_if_lost(device: BareDevice) -> None:
    """End this process if its device is lost, since no step on it will succeed again."""
    try:
        device.check()
    except DeviceLost as error:
        logger.critical("%s; this process ends", error)
        end_process()
