"""A clock that a test sets."""

from __future__ import annotations


class Clock:
    """Shows ``now``, in seconds; sleeps move it on, by ``late_s`` too far."""

    def __init__(self, now: float = 100.0, late_s: float = 0.0) -> None:
        self.now = now
        self.late_s = late_s

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.late_s
