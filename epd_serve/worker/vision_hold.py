"""Keeps the steps of an instance that steals behind its encodes."""

from __future__ import annotations

import time
from collections.abc import Callable

from epd_serve.sched.vision_first import VisionFirst

_LOOK_AGAIN_S = 0.002


class VisionHold:
    """Called on the engine's thread before each step; returns when the step may be computed.

    Args:
        num_items: number of items that wait for the tower or are in it.
        on_hold: called when a step has to wait; the tower need not wait for the language model then.
    """

    def __init__(
        self,
        num_items: Callable[[], int],
        on_hold: Callable[[], None],
        *,
        rule: VisionFirst | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._num_items = num_items
        self._on_hold = on_hold
        self._rule = rule or VisionFirst()
        self._clock = clock
        self._sleep = sleep
        self.held_s = 0.0

    def __call__(self) -> None:
        if self._rule.may_step(self._clock(), self._num_items()):
            return
        began_s = self._clock()
        self._on_hold()
        while not self._rule.may_step(self._clock(), self._num_items()):
            self._sleep(_LOOK_AGAIN_S)
        self.held_s += self._clock() - began_s
