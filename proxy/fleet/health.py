"""The instances that take work: breakers fed by calls and probes, slow start, drains, pairs kept apart."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from epd_serve.backends.base import StageCalls
from epd_serve.config.gateway import HealthConfig
from epd_serve.errors import InstanceLost, ServeError, Unavailable
from epd_serve.flow.events import Lost
from epd_serve.routing.table import InstanceRecord, InstanceTable
from epd_serve.types import Stage
from proxy.fleet.breaker import Breaker, BreakerLimits, BreakerState
from proxy.settings import Current

#: How long a pair is avoided at first; twice as long each time that it fails again.
_AVOID_S, _MAX_AVOID_S = 5.0, 60.0


class Pairs:
    """Has routing avoid pairs that have failed, for a while. With others, each of the two gets its share."""

    def __init__(self) -> None:
        self._avoid_s: dict[tuple[str, str], float] = {}

    def failed(self, caller: InstanceRecord, peer: InstanceRecord) -> None:
        """``caller`` says that it cannot reach ``peer``, or the other way round."""
        if peer.name in caller.cut_off:
            return
        pair = caller.name, peer.name
        avoid_s = self._avoid_s.get(pair, _AVOID_S)
        self._avoid_s[pair] = min(2 * avoid_s, _MAX_AVOID_S)
        logger.warning("instances %s and %s do not reach each other; kept apart for %g s", *pair, avoid_s)
        caller.cut_off.add(peer.name)
        asyncio.get_running_loop().call_later(avoid_s, caller.cut_off.discard, peer.name)

    def worked(self, caller: InstanceRecord, peer: InstanceRecord) -> None:
        """Next time it is avoided for a short while again."""
        if self._avoid_s:
            self._avoid_s.pop((caller.name, peer.name), None)


logger = logging.getLogger(__name__)

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
        """The instance is this process. Another one than before gets no work until it has computed something."""
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
        """There is reason to doubt that the instance computes."""
        self._of(name).probe_at = 0.0

    def probe_last(self, name: str, calls: StageCalls) -> None:
        """The instance leaves the table without a word: its requests go on there if it computes."""

        async def probe() -> None:
            try:
                await calls.probe(self._options.probe_timeout_s)
            except ServeError as error:
                logger.warning("what instance %s had goes elsewhere: %s", name, error.message)
                if self._table.get(name) is None:
                    self.losses.report(name)

        if self._probes is not None:
            self._probes.create_task(probe())

    @property
    def is_awaited(self) -> bool:
        """Whether requests wait for what is missing: it was there less than ``failover.wait_s`` ago."""
        at = self.was_complete_at
        return at is not None and self._clock() < at + self._settings.now.failover_wait_s

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
                for record in list(self._table):
                    watched = self._of(record.name)
                    if not record.ready or watched.probing or now < watched.probe_at:
                        continue
                    is_closed = watched.breaker.state is BreakerState.CLOSED
                    is_wanted = self._options.probe_interval_s is not None or not is_closed
                    if is_wanted and watched.breaker.may_probe(now):
                        watched.probing = True
                        probes.create_task(self._probe(record, watched))
                await asyncio.sleep(_TICK_S)

    async def _probe(self, record: InstanceRecord, watched: _Watched) -> None:
        name, was_closed = record.name, watched.breaker.state is BreakerState.CLOSED
        began = self._clock()
        try:
            passed = await self._passes(name, doubted=not was_closed)
        finally:
            watched.probing = False
            interval_s = self._options.probe_interval_s or _ASK_AGAIN_S
            watched.probe_at = self._clock() + interval_s * self._rng.uniform(0.8, 1.2)
        if passed is None or (not passed and self._stood_still_at >= began):
            return  # where this gateway stood still, that the answer is late says nothing
        watched.breaker.probed(passed, self._clock())
        self._apply(name, watched)
        if not passed:
            watched.probe_at = 0.0  # the breaker says when
            self.losses.report(name)
        elif (
            watched.breaker.state is BreakerState.CLOSED and watched.breaker.is_new and name not in self.returning
        ):
            self.returning.add(name)
            logger.info("instance %s computes again; it gets its share of work bit by bit", name)

    async def _passes(self, name: str, *, doubted: bool) -> bool | None:
        """None where the probe says nothing: the instance is gone, which others notice, or not ready."""
        calls = self._calls.get(name)
        if calls is None:
            return None
        try:
            await calls.probe(self._options.probe_timeout_s, doubted=doubted)
        except (InstanceLost, Unavailable):
            return None
        except ServeError as error:
            logger.warning("instance %s gets no work for now: %s", name, error.message)
            return False
        return True

    # ------------------------------------------------------------------ inside

    @property
    def _options(self) -> HealthConfig:
        return self._settings.now.gateway.health

    def _of(self, name: str) -> _Watched:
        if name not in self._watched:
            options = self._options
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
