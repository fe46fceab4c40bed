"""Keeps the instance table current: listens to what instances report, and asks those that report nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

import msgspec

from epd_serve.backends.base import StageCalls
from epd_serve.errors import InstanceUnreachable, InstanceUntrusted, InvalidRequest, ServeError
from epd_serve.protocol.instance_state import InstanceInfo
from epd_serve.routing.table import InstanceTable

logger = logging.getLogger(__name__)

#: Instances report five times a second. One that has been silent for so long gets no work that others can take.
STALE_S = 0.8
#: Silence is counted in this many parts, so that what came while this process itself stood still is read first.
_NUM_TICKS = 4
#: How often an instance that reports is asked for what its reports do not contain.
INFO_INTERVAL_S = 5.0
#: An instance that says what no instance can say is left alone for so long, then twice as long, up to the most. It
#: gets no work before a report that makes sense.
_DISTRUST_S, _MOST_DISTRUST_S = 1.0, 30.0
#: Reports that come faster than any instance makes them are read no faster than this.
_LEAST_INTERVAL_S = 0.005


@dataclass(slots=True)
class _Silence:
    """The time for which an instance may still be silent, and the call that ends then."""

    scope: asyncio.Timeout
    ticks_left: int = _NUM_TICKS


class _Answer(Enum):
    HERE = auto()
    NONE = auto()
    UNREACHABLE = auto()


class Poller:
    """Listens to every instance; requests wait for ``startup_wait_s`` while a deployment starts.

    An instance is asked what it is, then listened to. Where it makes no reports, or they end, it is asked each
    ``interval_s``. One that falls silent is asked at once, and once more where it cannot be reached.

    Attributes:
        on_process: told of an instance's process id, before the table has what that process says of itself.
        on_silent: told of an instance that reports nothing any more.
        on_gone: told of one that cannot be reached: of a host that has lost its power, nothing else says so.
    """

    def __init__(
        self,
        table: InstanceTable,
        calls: Mapping[str, StageCalls],
        interval_s: float,
        startup_wait_s: float,
        *,
        stale_s: float = STALE_S,
    ) -> None:
        self._table = table
        self._calls = calls
        self._interval_s = interval_s
        self._startup_wait_s = startup_wait_s
        self._stale_s = stale_s
        #: Set when the deployment can serve, or has had its time to start. A request that comes before then waits:
        #: load testers give up after a refused warm-up.
        self.started = asyncio.Event()
        self._mute: set[str] = set()
        self._distrust_s: dict[str, float] = {}
        self._silences: dict[str, _Silence] = {}
        self._wake = {name: asyncio.Event() for name in calls}
        self._group: asyncio.TaskGroup | None = None
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._watched_since: dict[str, float] = {}  # those that were not ready yet
        self.on_process: Callable[[str, int], None] = lambda name, pid: None
        self.on_silent: Callable[[str], None] = lambda name: None
        self.on_gone: Callable[[str], None] = lambda name: None

    def report_lost(self, name: str) -> None:
        """A connection to the instance failed: no work for it until it answers again; it is asked at once."""
        self._table.mark_lost(name)
        if name in self._wake:
            self._wake[name].set()

    def add(self, name: str) -> None:
        """Listen to another instance; its calls must be there."""
        self._wake[name] = asyncio.Event()
        if self._group is not None:
            self._watching[name] = self._group.create_task(self._watch(name))

    def remove(self, name: str) -> None:
        """Listen no more."""
        del self._wake[name]
        self._distrust_s.pop(name, None)
        self._watched_since.pop(name, None)
        if (watching := self._watching.pop(name, None)) is not None:
            watching.cancel()

    async def run(self) -> None:
        """Until cancelled; a slow instance delays no other."""
        loop = asyncio.get_running_loop()
        loop.call_later(self._startup_wait_s, self.started.set)
        async with asyncio.TaskGroup() as group:
            self._group = group
            self._watching = {name: group.create_task(self._watch(name)) for name in self._calls}
            while True:
                await asyncio.sleep(self._stale_s / _NUM_TICKS)
                for silence in self._silences.values():
                    silence.ticks_left -= 1
                    if silence.ticks_left == 0:
                        silence.scope.reschedule(loop.time())

    async def _watch(self, name: str) -> None:
        self._watched_since[name] = asyncio.get_running_loop().time()
        wake, num_unreachable = self._wake[name], 0
        while True:
            doubted = wake.is_set() or not self._table[name].ready
            wake.clear()  # before the question: what is reported during it is asked about again
            answer = await self._ask(name, doubted=doubted)
            num_unreachable = num_unreachable + 1 if answer is _Answer.UNREACHABLE else 0
            if num_unreachable == 1 and self._table[name].info is not None:
                continue
            if num_unreachable == 2:
                self._table.mark_gone(name)
                self.on_gone(name)
            if answer is _Answer.HERE and name not in self._mute:
                listening = asyncio.create_task(self._listen(name))
                waking = asyncio.create_task(wake.wait())
                try:
                    await asyncio.wait({listening, waking}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    listening.cancel()
                    waking.cancel()
                    ended = await asyncio.gather(listening, waking, return_exceptions=True)
                if ended[0] is True:
                    self.on_silent(name)
                    continue
            if name in self._distrust_s:
                await asyncio.sleep(self._distrust_s[name])
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await wake.wait()

    async def _ask(self, name: str, *, doubted: bool) -> _Answer:
        contains = self._table.num_calls
        try:
            info = await self._calls[name].info(doubted=doubted)
        except ServeError as error:
            self._lost(name, error)
            is_gone = isinstance(error, InstanceUnreachable) and not error.is_refused
            return _Answer.UNREACHABLE if is_gone else _Answer.NONE
        if name in self._distrust_s and name not in self._mute:
            info = msgspec.structs.replace(info, ready=False)  # its reports must say so
        heard = self._heard(name, lambda: self._update(name, info, contains=contains))
        if heard and name in self._mute:
            self._distrust_s.pop(name, None)
        return _Answer.HERE if heard else _Answer.NONE

    async def _listen(self, name: str) -> bool:
        """Until there are no more reports. Whether the instance has fallen silent."""
        loop, table, calls = asyncio.get_running_loop(), self._table, self._calls[name]
        reports, ask_at = calls.reports(), loop.time() + INFO_INTERVAL_S
        try:
            async with asyncio.timeout(None) as scope:
                silence = self._silences[name] = _Silence(scope)
                heard_at = 0.0
                async for report in reports:
                    silence.ticks_left = _NUM_TICKS
                    heard_at, before = loop.time(), heard_at
                    if heard_at - before < _LEAST_INTERVAL_S:
                        await asyncio.sleep(_LEAST_INTERVAL_S)
                    info = table[name].info
                    has_changed = info is None or report.epoch != info.epoch  # its role, before it gets work
                    if has_changed and not self._heard(name, partial(self._update, name, await calls.info())):
                        continue
                    if self._heard(name, partial(table.report, name, report)):
                        self._distrust_s.pop(name, None)
                    if not has_changed and loop.time() >= ask_at:
                        self._heard(name, partial(self._update, name, await calls.info()))
                        ask_at = loop.time() + INFO_INTERVAL_S
        except TimeoutError:
            table.mark_stale(name)
            logger.warning("instance %s has not reported for %g s", name, self._stale_s)
            return True
        except InvalidRequest:
            self._mute.add(name)
        except ServeError as error:
            self._lost(name, error)
        finally:
            self._silences.pop(name, None)
            await reports.aclose()
        return False

    def _update(self, name: str, info: InstanceInfo, *, contains: int | None = None) -> None:
        self.on_process(name, info.pid)
        self._table.update(name, info, contains=contains)

    def _heard(self, name: str, take_over: Callable[[], None]) -> bool:
        """Whether what the instance said makes sense."""
        record = self._table[name]
        was_ready = record.ready
        try:
            take_over()
        except ValueError as error:
            self._lost(name, error)
            return False
        if not self.started.is_set() and (
            not self._table.missing_stages()
            or (all(one.info is not None for one in self._table) and not self._table.lacks_roles())
        ):
            self.started.set()
        if record.ready and name in self._watched_since:
            start_s = asyncio.get_running_loop().time() - self._watched_since.pop(name)
            self._table.first_start_s = max(self._table.first_start_s, start_s)
        if record.ready and not was_ready:
            logger.info("instance %s (%s) is ready at %s", name, record.role, record.url)
        return True

    def _lost(self, name: str, error: Exception) -> None:
        untrusted = isinstance(error, InstanceUntrusted)
        if self._table[name].ready or (untrusted and name not in self._distrust_s):
            logger.warning("instance %s lost: %s", name, error)
        if untrusted:
            before_s = self._distrust_s.get(name, _DISTRUST_S / 2)
            self._distrust_s[name] = min(2 * before_s, _MOST_DISTRUST_S)
        self._table.mark_lost(name)
        self._mute.discard(name)  # what comes back may be another version
