"""The instances that take work: circuit breakers fed by calls and probes, slow start, drains, pairs kept apart."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from epd_serve.backends.base import StageCalls
from epd_serve.errors import InstanceLost, ServeError, Unavailable
from epd_serve.flow.events import Lost
from epd_serve.routing.table import InstanceRecord, InstanceTable
from epd_serve.types import Stage
from proxy.settings import Current

logger = logging.getLogger(__name__)

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


#: How long a pair is avoided at first; twice as long each time that it fails again.
_AVOID_S, _MAX_AVOID_S = 5.0, 60.0


class Pairs:
    """Has routing avoid pairs that have failed, for a while. With others, each of the two gets its share.

    Attributes:
        avoid_s: for how long a pair is avoided when it fails again; of those that have failed.
    """

    def __init__(self) -> None:
        self.avoid_s: dict[tuple[str, str], float] = {}

    def failed(self, caller: InstanceRecord, peer: InstanceRecord) -> None:
        """``caller`` says that it cannot reach ``peer``, or the other way round."""
        if peer.name in caller.cut_off:
            return
        pair = caller.name, peer.name
        avoid_s = self.avoid_s.get(pair, _AVOID_S)
        self.avoid_s[pair] = min(2 * avoid_s, _MAX_AVOID_S)
        logger.warning("instances %s and %s do not reach each other; kept apart for %g s", *pair, avoid_s)
        caller.cut_off.add(peer.name)
        asyncio.get_running_loop().call_later(avoid_s, caller.cut_off.discard, peer.name)

    def worked(self, caller: InstanceRecord, peer: InstanceRecord) -> None:
        """Next time it is avoided for a short while again."""
        self.avoid_s.pop((caller.name, peer.name), None)


_TICK_S = 0.1
_ASK_AGAIN_S = 0.5
_STOOD_STILL_S = 1.0


@dataclass(slots=True, eq=False)
class _Watched:
    breaker: Breaker
    pid: int | None = None
    probe_at: float = 0.0
    probing: bool = False
    draining: bool = False
    held: bool = False


class Watcher(Protocol):
    """Waits for instances (:class:`proxy.dispatch.dispatcher.Dispatch`)."""

    def feed(self, event: Lost) -> None: ...


class Losses(set[Watcher]):
    """All that wait for instances, to be told of one that has stopped answering."""

    def report(self, name: str) -> None:
        """The instance is as good as dead."""
        for watcher in list(self):
            watcher.feed(Lost(name))


class Health:
    """Keeps ``InstanceRecord.accepting`` true for instances with a closed breaker, neither drained nor held.

    Attributes:
        was_complete_at: when there was an instance for each stage last; None: never. What it lacks since then is
            expected back, in this instance or another one.
        returning: instances that have come back lately.
    """

    def __init__(
        self,
        table: InstanceTable,
        calls: Mapping[str, StageCalls],
        settings: Current,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.losses = Losses()
        self.was_complete_at: float | None = None
        self.returning: set[str] = set()
        self._table = table
        self._calls = calls
        self._settings = settings
        self._clock = clock
        self._rng = rng or random.Random()
        self._watched: dict[str, _Watched] = {}
        self._stood_still_at = -math.inf
        self._probes: asyncio.TaskGroup | None = None

    # ------------------------------------------------------------------ from requests

    def ended(self, names: Collection[str], failed: Collection[str] = ()) -> None:
        """A request has left these instances; ``failed`` are those among them that failed it."""
        now = self._clock()
        for name in names:
            watched = self._watched.get(name) or self._of(name)
            if watched.breaker.record(name in failed, now):
                logger.warning("instance %s gets no work for now: too many requests have failed there", name)
                watched.probe_at = 0.0
                self._apply(name, watched)

    def held_back(self) -> set[str]:
        """Instances of :attr:`returning` that this request should rather avoid: they get few at first."""
        now, held = self._clock(), set()
        for name in list(self.returning):
            watched = self._watched.get(name)
            if watched is None or not watched.breaker.is_new:
                self.returning.discard(name)
                continue
            share = watched.breaker.share(now)
            if 0.0 < share < 1.0 and self._rng.random() >= share and self._has_other(name):
                held.add(name)
        return held

    def _has_other(self, name: str) -> bool:
        """Whether each stage of the instance has another that takes all its share."""
        record, now = self._table.get(name), self._clock()
        return record is not None and all(
            any(
                other.name != name and self._of(other.name).breaker.share(now) == 1.0
                for other in self._table.ready(stage)
            )
            for stage in Stage
            if stage in record.stages
        )

    # ------------------------------------------------------------------ from the poller

    def met(self, name: str, pid: int) -> None:
        """The instance is this process. Another one than before gets no work until it has answered."""
        watched = self._of(name)
        if watched.pid not in (None, pid):
            watched.breaker.restarted()
            watched.probe_at = 0.0
            for record in self._table:  # whom the process before could not reach says nothing of this one
                record.cut_off.discard(name)
                if record.name == name:
                    record.cut_off.clear()
            self._apply(name, watched)
        watched.pid = pid

    # ------------------------------------------------------------------ from the operator

    def drain(self, name: str, on: bool = True) -> None:
        """No new requests for an instance; those that it has go on. Raises KeyError."""
        watched = self._of(self._table[name].name)
        watched.draining = on
        self._apply(name, watched)

    def hold(self, name: str, on: bool = True) -> None:
        """The same for as long as it changes its role, beside what the operator orders. Raises KeyError."""
        watched = self._of(self._table[name].name)
        watched.held = on
        self._apply(name, watched)

    def describe(self, name: str) -> dict[str, object]:
        """Describe an instance for people: its breaker's state, whether it is drained, its share."""
        watched = self._of(name)
        return {
            "breaker": watched.breaker.state.name.lower(),
            "draining": watched.draining or watched.held,
            "share": round(watched.breaker.share(self._clock()), 3),
        }

    def forget(self, name: str) -> None:
        """The instance is no part of the deployment any more."""
        self._watched.pop(name, None)

    # ------------------------------------------------------------------ probes

    def probe_now(self, name: str) -> None:
        """There is reason to doubt that the instance answers."""
        self._of(name).probe_at = 0.0

    def probe_last(self, name: str, calls: StageCalls) -> None:
        """The instance leaves the table without a word: its requests go on there if it answers."""

        async def probe() -> None:
            try:
                await calls.probe(self._settings.now.gateway.health.probe_timeout_s)
            except ServeError as error:
                logger.warning("what instance %s had goes elsewhere: %s", name, error.message)
                if self._table.get(name) is None:
                    self.losses.report(name)

        if self._probes is not None:
            self._probes.create_task(probe())

    @property
    def wait_s(self) -> float:
        """The time for which a request waits for an instance where none is left for a stage."""
        return self._settings.now.replacement_wait_s(self._table.first_start_s)

    @property
    def is_awaited(self) -> bool:
        """Whether requests wait for what is missing: it was there less than :attr:`wait_s` ago."""
        at = self.was_complete_at
        return at is not None and self._clock() < at + self.wait_s

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as probes:
            self._probes = probes
            ticked_at = self._clock()
            while True:
                now = self._clock()
                if now - ticked_at > _STOOD_STILL_S:
                    self._stood_still_at = now
                ticked_at = now
                if not self._table.missing_stages():
                    self.was_complete_at = now
                probe_interval_s = self._settings.now.gateway.health.probe_interval_s
                for record in list(self._table):
                    watched = self._watched.get(record.name) or self._of(record.name)
                    if not record.ready or watched.probing or now < watched.probe_at:
                        continue
                    is_closed = watched.breaker.state is BreakerState.CLOSED
                    is_wanted = probe_interval_s is not None or not is_closed
                    if is_wanted and watched.breaker.may_probe(now):
                        watched.probing = True
                        probes.create_task(self._probe(record, watched))
                await asyncio.sleep(_TICK_S)

    async def _probe(self, record: InstanceRecord, watched: _Watched) -> None:
        name = record.name
        began = self._clock()
        try:
            passed = await self._passes(name)
        finally:
            watched.probing = False
            interval_s = self._settings.now.gateway.health.probe_interval_s or _ASK_AGAIN_S
            watched.probe_at = self._clock() + interval_s * self._rng.uniform(0.8, 1.2)
        if passed is None or (not passed and self._stood_still_at >= began):
            return  # where this gateway stood still, that the answer is late says nothing
        if passed:
            self._table.mark_returned(name)
        watched.breaker.probed(passed, self._clock())
        self._apply(name, watched)
        if not passed:
            watched.probe_at = 0.0  # the breaker says when
            self._table.mark_silent(name)
            self.losses.report(name)
        elif (
            watched.breaker.state is BreakerState.CLOSED and watched.breaker.is_new and name not in self.returning
        ):
            self.returning.add(name)
            logger.info("instance %s answers again; it gets its share of work bit by bit", name)

    async def _passes(self, name: str) -> bool | None:
        """None where the probe says nothing: the instance is gone, which others notice, or not ready."""
        calls = self._calls.get(name)
        if calls is None:
            return None
        try:
            await calls.probe(self._settings.now.gateway.health.probe_timeout_s)
        except (InstanceLost, Unavailable):
            return None
        except ServeError as error:
            logger.warning("instance %s gets no work for now: %s", name, error.message)
            return False
        return True

    # ------------------------------------------------------------------ inside

    def _of(self, name: str) -> _Watched:
        if name not in self._watched:
            options = self._settings.now.gateway.health
            limits = BreakerLimits(
                num_consecutive=options.max_failures,
                failure_rate=options.max_failure_rate,
                slow_start_s=options.slow_start_s,
            )
            self._watched[name] = _Watched(Breaker(limits))
        return self._watched[name]

    def _apply(self, name: str, watched: _Watched) -> None:
        with contextlib.suppress(KeyError):  # it was removed meanwhile
            closed = watched.breaker.state is BreakerState.CLOSED
            self._table[name].accepting = closed and not watched.draining and not watched.held
