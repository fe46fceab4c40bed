"""Watches the instances of a gateway: their state, their reports, and who is told when one is down."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Protocol

import msgspec

from epd_serve.backends.base import StageCalls
from epd_serve.errors import (
    InstanceLost,
    InstanceUnreachable,
    InstanceUntrusted,
    InvalidRequest,
    ServeError,
    Unavailable,
)
from epd_serve.protocol.instance_state import InstanceInfo
from epd_serve.routing.table import InstanceTable
from proxy.settings import GatewaySettings

logger = logging.getLogger(__name__)

#: Instances report five times a second. One that has been silent for so long gets no new request until it reports.
SILENT_S = 5.0
#: How often an instance that reports is asked for what its reports do not contain.
INFO_INTERVAL_S = 5.0
_TICK_S = 0.1


class Watcher(Protocol):
    """A request under way."""

    def lose_instance(self, name: str) -> None:
        """Leave an instance that does not answer."""


class Monitor:
    """Keeps the instance table current.

    An instance is asked for its info, then listened to. One that makes no reports is asked again and again. It is
    up while it answers and says that it is ready. It is down, and its requests go elsewhere, once it cannot be
    reached, or answers nothing for ``gateway.probe_timeout_s`` though its connections are open.

    Attributes:
        started: set when the deployment can serve, or has had its time to start. A request that comes before
            waits: load testers give up after a refused warm-up.
        watchers: the requests under way.
        complete_at_s: when each stage had an instance last, on the loop's clock; None: never.
    """

    def __init__(self, table: InstanceTable, calls: Mapping[str, StageCalls], settings: GatewaySettings) -> None:
        self.started = asyncio.Event()
        self.watchers: set[Watcher] = set()
        self.complete_at_s: float | None = None
        self._table = table
        self._calls = calls
        self._settings = settings
        self._group: asyncio.TaskGroup | None = None
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._doubts = {name: asyncio.Event() for name in calls}
        self._listening: dict[str, asyncio.Timeout] = {}
        self._starting: dict[str, float] = {}  # since when instances that were never ready are watched
        self._distrusted: set[str] = set()  # their last report was none of an instance: the next one decides

    # ------------------------------------------------------------------ for requests

    @property
    def wait_s(self) -> float:
        """Seconds for which a request waits for an instance where none is left for a stage."""
        return self._settings.replacement_wait_s(self._table.first_start_s)

    @property
    def is_awaited(self) -> bool:
        """Whether requests wait for a missing stage: it was there less than :attr:`wait_s` ago."""
        at_s = self.complete_at_s
        return at_s is not None and asyncio.get_running_loop().time() < at_s + self.wait_s

    def report_lost(self, name: str) -> None:
        """A connection to the instance failed: give it no work until it answers again, and ask it at once."""
        self._table.mark_lost(name)
        if name in self._doubts:
            self._doubts[name].set()
        if (scope := self._listening.get(name)) is not None and not scope.expired():
            scope.reschedule(0.0)

    def report_down(self, name: str) -> None:
        """The instance does not answer: its requests go elsewhere."""
        self._table.mark_down(name)
        for watcher in list(self.watchers):
            watcher.lose_instance(name)

    # ------------------------------------------------------------------ the instances

    def add(self, name: str) -> None:
        """Watch another instance; its calls must be there."""
        self._doubts[name] = asyncio.Event()
        if self._group is not None:
            self._watching[name] = self._group.create_task(self._watch(name))

    def remove(self, name: str) -> None:
        """Watch an instance no more."""
        del self._doubts[name]
        self._starting.pop(name, None)
        self._distrusted.discard(name)
        if (watching := self._watching.pop(name, None)) is not None:
            watching.cancel()

    async def run(self) -> None:
        """Until cancelled; a slow instance delays no other."""
        loop = asyncio.get_running_loop()
        loop.call_later(self._settings.startup_wait_s, self.started.set)
        async with asyncio.TaskGroup() as group:
            self._group = group
            self._watching = {name: group.create_task(self._watch(name)) for name in self._calls}
            while True:
                if not self._table.missing_stages():
                    self.complete_at_s = loop.time()
                await asyncio.sleep(_TICK_S)

    async def _watch(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        doubt = self._doubts[name]
        self._starting[name] = loop.time()
        reports, is_silent, probe_at = True, False, 0.0
        while True:
            if is_silent or (not reports and loop.time() >= probe_at):
                is_silent = not await self._answers(name)
                probe_at = loop.time() + self._settings.gateway.probe_timeout_s / 2
            if not is_silent:
                doubt.clear()  # before the question: what is reported during it is asked about again
                try:
                    await self._ask(name, reports=reports)
                    reports = reports and await self._listen(name)
                except TimeoutError:
                    if not doubt.is_set():
                        logger.warning("instance %s has not reported for %g s", name, SILENT_S)
                        self._table.mark_lost(name)
                        is_silent = True
                    continue
                except (ServeError, ValueError) as error:
                    self._lost(name, error)
                    is_silent = reports = True  # what comes back may be another version
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.poll_interval_s):
                    await doubt.wait()

    async def _answers(self, name: str) -> bool:
        """Return whether an instance answers, or tells at once that it does not; else it is down.

        Asked twice: where this gateway itself stood still, a first answer that is late says nothing.
        """
        failure: ServeError | None = None
        for _ in range(2):
            try:
                await self._calls[name].probe(self._settings.gateway.probe_timeout_s / 2)
                return True
            except InstanceUnreachable as error:
                if error.is_refused:
                    return True
                failure = error
            except (InstanceLost, Unavailable):
                return True
            except ServeError as error:
                failure = error
        if not self._table[name].is_down:
            logger.warning("instance %s is down: %s", name, failure)
        self.report_down(name)
        return False

    async def _ask(self, name: str, *, reports: bool) -> None:
        contains = self._table.num_calls
        info = await self._calls[name].info()
        if not reports:
            self._distrusted.discard(name)
        elif name in self._distrusted:
            info = msgspec.structs.replace(info, ready=False)
        self._update(name, info, contains)

    async def _listen(self, name: str) -> bool:
        """Take over reports until they end; return whether the instance makes any.

        Raises TimeoutError when none comes, or when a request has lost a connection to it.
        """
        loop, table, calls = asyncio.get_running_loop(), self._table, self._calls[name]
        reports, ask_at = calls.reports(), loop.time() + INFO_INTERVAL_S
        try:
            async with asyncio.timeout(SILENT_S) as scope:
                self._listening[name] = scope
                async for report in reports:
                    info = table[name].info
                    if info is None or report.epoch != info.epoch or loop.time() >= ask_at:
                        self._update(name, await calls.info())  # its role, before it gets work
                        ask_at = loop.time() + INFO_INTERVAL_S
                    was_ready = table[name].ready
                    table.report(name, report)
                    self._distrusted.discard(name)
                    self._note_ready(name, was_ready)
                    if not (self._doubts[name].is_set() or scope.expired()):
                        scope.reschedule(loop.time() + SILENT_S)
        except InvalidRequest:
            return False
        finally:
            self._listening.pop(name, None)
            await reports.aclose()
        return True

    # ------------------------------------------------------------------ what becomes of it

    def _update(self, name: str, info: InstanceInfo, contains: int | None = None) -> None:
        """Raises ValueError for an info that no instance has."""
        was_ready = self._table[name].ready
        self._table.update(name, info, contains=contains)
        self._note_ready(name, was_ready)

    def _note_ready(self, name: str, was_ready: bool) -> None:
        """Note that an instance is up for the first time, or again, and that the deployment has started."""
        table, record = self._table, self._table[name]
        if not self.started.is_set() and (
            not table.missing_stages() or (all(one.info is not None for one in table) and not table.lacks_roles())
        ):
            self.started.set()
        if record.ready and name in self._starting:
            start_s = asyncio.get_running_loop().time() - self._starting.pop(name)
            table.first_start_s = max(table.first_start_s, start_s)
        if record.ready and not was_ready:
            logger.info("instance %s (%s) is ready at %s", name, record.role, record.url)

    def _lost(self, name: str, error: Exception) -> None:
        if self._table[name].ready:
            logger.warning("instance %s lost: %s", name, error)
        if isinstance(error, InstanceUntrusted | ValueError):
            self._distrusted.add(name)
        self._table.mark_lost(name)
