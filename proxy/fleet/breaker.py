"""A circuit breaker: no work for an instance that keeps failing, a little at first for one that has come back."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum, auto

_NUM_SLICES = 10
_LEAST_SHARE = 0.1


class BreakerState(Enum):
    CLOSED = auto()  # takes work
    OPEN = auto()  # takes none, and is left in peace for a while
    HALF_OPEN = auto()  # takes none but a probe, which decides


_ALLOWED: dict[BreakerState, frozenset[BreakerState]] = {
    BreakerState.CLOSED: frozenset({BreakerState.OPEN, BreakerState.HALF_OPEN}),
    BreakerState.OPEN: frozenset({BreakerState.HALF_OPEN}),
    BreakerState.HALF_OPEN: frozenset({BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN}),
}


@dataclass(frozen=True, kw_only=True)
class BreakerLimits:
    """The conditions under which a breaker opens and closes.

    Attributes:
        num_consecutive: failures in a row that open it.
        failure_rate: share of the calls of the last ``window_s`` that opens it, where there were ``min_calls``.
        open_s: how long it stays open at first; twice as long after each failed probe, ``max_open_s`` at most.
        slow_start_s: over how long the share of work grows from a tenth to all, once it has closed again.
    """

    num_consecutive: int
    failure_rate: float
    slow_start_s: float
    min_calls: int = 20
    window_s: float = 30.0
    open_s: float = 1.0
    max_open_s: float = 30.0


class Breaker:
    """The circuit breaker of one instance. Pure: the clock's reading is passed in and never goes back."""

    def __init__(self, limits: BreakerLimits) -> None:
        self._limits = limits
        self.state = BreakerState.CLOSED
        self._num_consecutive = 0
        self._slices: deque[list[int]] = deque()  # number of the slice of time, calls, failures
        self._slices_per_s = _NUM_SLICES / limits.window_s
        self._num_calls = self._num_failures = 0  # of them all
        self._open_s = limits.open_s
        self._until = 0.0
        self._closed_at: float | None = None

    @property
    def is_new(self) -> bool:
        """Whether it closed lately, so that its share may be less than all."""
        return self._closed_at is not None

    def share(self, now: float) -> float:
        """The part that it gets of the work that it would get otherwise: 0 to 1."""
        if self.state is not BreakerState.CLOSED:
            return 0.0
        if self._closed_at is None or self._limits.slow_start_s <= 0:
            return 1.0
        share = (now - self._closed_at) / self._limits.slow_start_s
        if share >= 1.0:
            self._closed_at = None
        return min(1.0, max(_LEAST_SHARE, share))

    def record(self, failed: bool, now: float) -> bool:
        """A call has ended; whether that opens it. Those that end while it is not closed say nothing new."""
        if self.state is not BreakerState.CLOSED:
            return False
        limits, slices, number = self._limits, self._slices, int(now * self._slices_per_s)
        if not slices or slices[-1][0] != number:
            slices.append([number, 0, 0])
            while slices[0][0] <= number - _NUM_SLICES:
                _, calls, failures = slices.popleft()
                self._num_calls -= calls
                self._num_failures -= failures
        latest = slices[-1]
        latest[1] += 1
        self._num_calls += 1
        if not failed:
            self._num_consecutive = 0
            if not self._num_failures:
                return False
        else:
            latest[2] += 1
            self._num_failures += 1
            self._num_consecutive += 1
        num_calls = self._num_calls
        too_many = num_calls >= limits.min_calls and self._num_failures >= limits.failure_rate * num_calls
        if self._num_consecutive < limits.num_consecutive and not too_many:
            return False
        self._open(now)
        return True

    def may_probe(self, now: float) -> bool:
        """Whether a probe is due; an open breaker is half-open from then on."""
        if self.state is BreakerState.OPEN and now >= self._until:
            self._move_to(BreakerState.HALF_OPEN)
        return self.state is not BreakerState.OPEN

    def probed(self, passed: bool, now: float) -> None:
        """Take note of a probe; a failed one opens the breaker, whatever the calls say."""
        if self.state is BreakerState.OPEN:
            return  # begun before it opened
        if not passed:
            if self.state is BreakerState.HALF_OPEN:
                self._open_s = min(2 * self._open_s, self._limits.max_open_s)
            self._open(now)
        elif self.state is BreakerState.HALF_OPEN:
            self._open_s = self._limits.open_s
            self._num_consecutive = 0
            self._slices.clear()
            self._num_calls = self._num_failures = 0
            self._closed_at = now
            self._move_to(BreakerState.CLOSED)

    def restarted(self) -> None:
        """The instance is another process now: what the old one did counts no more, and a probe decides."""
        self._open_s = self._limits.open_s
        if self.state is BreakerState.OPEN:
            self._until = 0.0
        self._move_to(BreakerState.HALF_OPEN)

    def _open(self, now: float) -> None:
        self._until = now + self._open_s
        self._move_to(BreakerState.OPEN)

    def _move_to(self, state: BreakerState) -> None:
        assert state in _ALLOWED[self.state], f"{self.state.name} -> {state.name}"
        self.state = state
