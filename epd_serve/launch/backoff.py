"""Waiting times before a process that has died is started again."""

from __future__ import annotations

from dataclasses import dataclass

_MAX_DOUBLINGS = 32


@dataclass(slots=True, kw_only=True)
class Backoff:
    """1, 2, 4 ... seconds before the next start; from the beginning again after it ran well for a while.

    Attributes:
        first_s: wait before the first new start.
        limit_s: longest wait.
        well_after_s: time for which a process must have been ready for its earlier deaths to be forgotten.
    """

    first_s: float = 1.0
    limit_s: float = 30.0
    well_after_s: float = 60.0
    _num_deaths: int = 0

    def next_delay_s(self, ready_s: float) -> float:
        """Seconds to wait after a death of a process that had been ready for ``ready_s`` seconds."""
        if ready_s >= self.well_after_s:
            self._num_deaths = 0
        delay_s = min(self.first_s * 2.0 ** min(self._num_deaths, _MAX_DOUBLINGS), self.limit_s)
        self._num_deaths += 1
        return delay_s
