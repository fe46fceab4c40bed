"""The instances of a gateway: membership, health, and moving requests away from dead ones."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from epd_serve.backends.base import StageCalls
from epd_serve.backends.native import NativeConnections, NativeInstance
from epd_serve.backends.vllm import VllmInstances, VllmTarget
from epd_serve.backends.vllm_command import Connectors
from epd_serve.config import DeploymentConfig
from epd_serve.errors import (
    Conflict,
    InstanceLost,
    InstanceUnreachable,
    InstanceUntrusted,
    InvalidRequest,
    ServeError,
    Unavailable,
)
from epd_serve.protocol.instance_state import InstanceInfo
from epd_serve.routing.routes import RoutePolicy
from epd_serve.routing.table import InstanceRecord, InstanceTable
from epd_serve.topology import Topology, place
from epd_serve.topology.placement import CPU
from proxy.settings import GatewaySettings

logger = logging.getLogger(__name__)

#: Instances report five times a second. After this silence one gets no new request until it reports.
SILENT_S = 5.0
#: How often to ask a reporting instance for what its reports lack.
INFO_INTERVAL_S = 5.0
_TICK_S = 0.1
#: A longer gap between two ticks means that this process was stopped and missed renewals of leases.
_STOPPED_S = 0.5


class NoSuchInstance(InvalidRequest):
    status = 404
    default_code = "instance_not_found"


class Connect(Protocol):
    """Returns the calls to an instance; ``role`` is for one that the topology does not name."""

    def __call__(self, name: str, url: str, role: str | None = None) -> StageCalls: ...


class Member(msgspec.Struct, frozen=True):
    """An instance of the deployment; a vLLM instance does not report its own role."""

    url: str
    role: str


@dataclass(slots=True)
class _Lease:
    """Membership of an instance that joined by itself."""

    url: str
    incarnation: int
    term_s: float
    deadline: float


class Watcher(Protocol):
    """A running request."""

    def lose_instance(self, name: str) -> None:
        """Move away from an instance that does not answer."""


@dataclass(slots=True, eq=False)
class _Watch:
    """Health monitoring of one instance.

    Attributes:
        doubt: set when a request loses its connection to the instance.
        listening: timeout for the next report.
        starting_s: start of monitoring, until the instance is ready for the first time.
        is_distrusted: its last answer was invalid; the next one decides.
    """

    record: InstanceRecord
    calls: StageCalls
    doubt: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    listening: asyncio.Timeout | None = None
    starting_s: float | None = None
    is_distrusted: bool = False


class Fleet:
    """Keeps the instance table current, and adds and removes instances.

    The fleet asks each instance for its info, then listens to its reports; one without reports is polled. An
    instance is up while it reports ready. It is down, and its requests move elsewhere, if it is unreachable or
    silent for ``gateway.probe_timeout_s``.

    Attributes:
        topology: the deployment's topology as configured, for display.
        started: set when the deployment can serve or its startup time has passed. Earlier requests wait, because
            load testers give up after a refused warm-up.
        watchers: running requests.
        complete_at_s: last time on the loop's clock when each stage had an instance; None: never.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        instances: list[tuple[str, str]],
        connect: Connect,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``instances``: pairs of a name and a control URL."""
        self.settings = settings
        self.table = InstanceTable(instances)
        self.calls = {name: connect(name, url) for name, url in instances}
        self.policy = RoutePolicy(settings.gateway.routing)
        self.topology: Topology | None = settings.config.topology
        self.started = asyncio.Event()
        self.watchers: set[Watcher] = set()
        self.complete_at_s: float | None = None
        self._connect = connect
        self._leases: dict[str, _Lease] = {}  # of instances that joined by themselves
        self._clock = clock
        self._checked_at = clock()
        self._watches = {name: _Watch(self.table[name], calls) for name, calls in self.calls.items()}
        self._group: asyncio.TaskGroup | None = None

    def layout(self) -> str | None:
        """Return the topology's line while its instances have its roles, else their numbers by role, as in 2E-P-D.

        An instance that has not answered yet counts with its role in the topology. None: all roles are unknown.
        """
        topology = self.topology
        planned = {} if topology is None else {one.name: one.role for one in place(topology, [CPU])}
        roles = {one.name: one.role or planned.get(one.name) for one in self.table}
        if topology is not None and roles == planned:
            return str(topology)
        counts = Counter(role for role in roles.values() if role is not None)
        in_order = sorted(counts, key=lambda role: ["EPD".index(stage) for stage in str(role)])
        return "-".join(f"{counts[role] if counts[role] > 1 else ''}{role}" for role in in_order) or None

    # ------------------------------------------------------------------ requests

    @property
    def wait_s(self) -> float:
        """Seconds that a request waits for an instance of a missing stage."""
        return self.settings.replacement_wait_s(self.table.first_start_s)

    @property
    def is_awaited(self) -> bool:
        """True while requests wait for a missing stage, lost less than :attr:`wait_s` ago."""
        at_s = self.complete_at_s
        return at_s is not None and asyncio.get_running_loop().time() < at_s + self.wait_s

    def report_lost(self, name: str) -> None:
        """Give an instance whose connection failed no requests until it answers; ask it at once."""
        self.table.mark_lost(name)
        if (watch := self._watches.get(name)) is not None:
            watch.doubt.set()
            if watch.listening is not None and not watch.listening.expired():
                watch.listening.reschedule(0.0)

    def report_down(self, name: str) -> None:
        """Move the requests of an unresponsive instance elsewhere."""
        self.table.mark_down(name)
        for watcher in list(self.watchers):
            watcher.lose_instance(name)

    # ------------------------------------------------------------------ membership

    def replace(self, instances: Mapping[str, Member], topology: Topology | None) -> None:
        """Replace the instances that did not join by themselves; a new URL means a new instance.

        Raises InvalidRequest, without any change, for the name of a joined instance.
        """
        wanted = {name: one.url for name, one in instances.items()}
        if both := sorted(set(wanted) & set(self._leases)):
            raise InvalidRequest(f"instance {both[0]} has already joined; choose another name")
        wanted |= {name: lease.url for name, lease in self._leases.items()}
        here = {record.name: record.url for record in self.table}
        for name in [name for name, url in here.items() if wanted.get(name) != url]:
            self._remove(name)
        for name, url in wanted.items():
            if here.get(name) != url:
                self._add(name, url, instances[name].role)
        self.topology = topology

    def join(self, name: str, url: str, lease_s: float, *, role: str | None = None, incarnation: int = 0) -> bool:
        """Add an instance, which :meth:`replace` keeps, or renew its lease; return whether it is new.

        It replaces an instance of its name with an older incarnation or without answers. Raises Conflict for a
        name of the deployment or of another joined instance, InvalidRequest for one that cannot be called.
        """
        deadline = self._clock() + lease_s
        if (lease := self._leases.get(name)) is not None:
            if lease.url == url:
                lease.term_s, lease.deadline, lease.incarnation = lease_s, deadline, incarnation
                return False
            numbered = bool(incarnation and lease.incarnation)
            is_newer = numbered and incarnation > lease.incarnation
            if not is_newer and (numbered or self.table[name].ready):
                raise Conflict(
                    f"an instance {name} at {lease.url} has joined; choose another name or wait until it leaves"
                )
            logger.warning("instance %s at %s replaces the one at %s", name, url, lease.url)
            self._lose(name)
        if self.table.get(name) is not None:
            raise Conflict(f"the deployment already has an instance {name}; choose another name")
        try:
            self._add(name, url, role)
        except ValueError as error:
            raise InvalidRequest(f"instance {name} cannot join: {error}", param="url") from error
        self._leases[name] = _Lease(url, incarnation, lease_s, deadline)
        return True

    def leave(self, name: str, incarnation: int = 0) -> None:
        """Remove a joined instance; its requests finish there. ``incarnation`` 0 matches any.

        Raises NoSuchInstance.
        """
        if (lease := self._leases.get(name)) is None:
            joined = ", ".join(self._leases) or "none"
            raise NoSuchInstance(f"no instance {name[:100]!r} has joined; joined: {joined}", param="name")
        if incarnation not in (0, lease.incarnation):
            raise NoSuchInstance(f"another incarnation of instance {name} has joined", param="name")
        del self._leases[name]
        self._remove(name)

    def expire_leases(self) -> None:
        """Remove joined instances that have not renewed their lease; call every ``_TICK_S``."""
        before, now = self._checked_at, self._clock()
        self._checked_at = now
        if now - before > _STOPPED_S:
            for lease in self._leases.values():
                lease.deadline = now + lease.term_s
        for name in [name for name, lease in self._leases.items() if lease.deadline <= now]:
            logger.warning("instance %s has not renewed its lease", name)
            self._lose(name)

    def _lose(self, name: str) -> None:
        """Remove a joined instance; its requests move elsewhere."""
        del self._leases[name]
        self._remove(name)
        self.report_down(name)

    def _add(self, name: str, url: str, role: str | None) -> None:
        self.calls[name] = self._connect(name, url, role)
        logger.info("instance %s at %s joined the deployment", name, url)
        self.table.add(name, url)
        watch = self._watches[name] = _Watch(self.table[name], self.calls[name])
        if self._group is not None:
            watch.task = self._group.create_task(self._watch(watch))

    def _remove(self, name: str) -> None:
        """Remove an instance; its open requests finish."""
        logger.info("instance %s at %s left the deployment", name, self.table[name].url)
        if (task := self._watches.pop(name).task) is not None:
            task.cancel()
        self.table.remove(name)
        del self.calls[name]

    # ------------------------------------------------------------------ health

    async def run(self) -> None:
        """Monitor all instances until cancelled."""
        loop = asyncio.get_running_loop()
        loop.call_later(self.settings.startup_wait_s, self.started.set)
        async with asyncio.TaskGroup() as group:
            self._group = group
            for watch in self._watches.values():
                watch.task = group.create_task(self._watch(watch))
            while True:
                if not self.table.missing_stages():
                    self.complete_at_s = loop.time()
                self.expire_leases()
                await asyncio.sleep(_TICK_S)

    async def _watch(self, watch: _Watch) -> None:
        loop, record, doubt = asyncio.get_running_loop(), watch.record, watch.doubt
        watch.starting_s = loop.time()
        reports, is_silent, probe_at = True, False, 0.0
        while True:
            if is_silent or (not reports and loop.time() >= probe_at):
                is_silent = not await self._answers(watch)
                probe_at = loop.time() + self.settings.gateway.probe_timeout_s / 2
            if not is_silent:
                doubt.clear()  # before asking: a loss during the question leads to another one
                try:
                    contains = self.table.num_calls
                    info = await watch.calls.info()
                    if not reports:
                        watch.is_distrusted = False
                    elif watch.is_distrusted:
                        info = msgspec.structs.replace(info, ready=False)
                    self._update(watch, info, contains)
                    reports = reports and await self._listen(watch)
                except TimeoutError:
                    if not doubt.is_set():
                        logger.warning("instance %s has not reported for %g s", record.name, SILENT_S)
                        self.table.mark_lost(record.name)
                        is_silent = True
                    continue
                except (ServeError, ValueError) as error:
                    if record.ready:
                        logger.warning("instance %s lost: %s", record.name, error)
                    watch.is_distrusted |= isinstance(error, InstanceUntrusted | ValueError)
                    self.table.mark_lost(record.name)
                    is_silent = reports = True  # it may return as another version
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.settings.poll_interval_s):
                    await doubt.wait()

    async def _answers(self, watch: _Watch) -> bool:
        """Return whether an instance answers or refuses at once; else report it as down.

        It asks twice: if this gateway itself was stopped, a late first answer proves nothing.
        """
        failure: ServeError | None = None
        for _ in range(2):
            try:
                await watch.calls.probe(self.settings.gateway.probe_timeout_s / 2)
                return True
            except InstanceUnreachable as error:
                if error.is_refused:
                    return True
                failure = error
            except (InstanceLost, Unavailable):
                return True
            except ServeError as error:
                failure = error
        if not watch.record.is_down:
            logger.warning("instance %s is down: %s", watch.record.name, failure)
        self.report_down(watch.record.name)
        return False

    async def _listen(self, watch: _Watch) -> bool:
        """Apply an instance's reports until they end; return whether it makes any.

        Raises TimeoutError if none comes or a request loses its connection.
        """
        loop, record, reports = asyncio.get_running_loop(), watch.record, watch.calls.reports()
        ask_at = loop.time() + INFO_INTERVAL_S
        try:
            async with asyncio.timeout(SILENT_S) as watch.listening:
                async for report in reports:
                    if record.info is None or report.epoch != record.info.epoch or loop.time() >= ask_at:
                        self._update(watch, await watch.calls.info())  # learn its role before it gets requests
                        ask_at = loop.time() + INFO_INTERVAL_S
                    was_ready = record.ready
                    self.table.report(record.name, report)
                    watch.is_distrusted = False
                    self._note_ready(watch, was_ready)
                    if not (watch.doubt.is_set() or watch.listening.expired()):
                        watch.listening.reschedule(loop.time() + SILENT_S)
        except InvalidRequest:
            return False
        finally:
            watch.listening = None
            await reports.aclose()
        return True

    def _update(self, watch: _Watch, info: InstanceInfo, contains: int | None = None) -> None:
        """Raises ValueError for an invalid info."""
        was_ready = watch.record.ready
        self.table.update(watch.record.name, info, contains=contains)
        self._note_ready(watch, was_ready)

    def _note_ready(self, watch: _Watch, was_ready: bool) -> None:
        """Log a newly ready instance, measure its start, and note that the deployment has started."""
        table, record = self.table, watch.record
        if not self.started.is_set() and (
            not table.missing_stages() or (all(one.info is not None for one in table) and not table.lacks_roles())
        ):
            self.started.set()
        if record.ready and watch.starting_s is not None:
            start_s, watch.starting_s = asyncio.get_running_loop().time() - watch.starting_s, None
            table.first_start_s = max(table.first_start_s, start_s)
        if record.ready and not was_ready:
            logger.info("instance %s (%s) is ready at %s", record.name, record.role, record.url)


#: vLLM flags under which an answer cannot continue from its tokens: text is parsed as a whole, or an event has
#: several tokens and its text may end before the last.
_NOT_RESUMABLE = frozenset({"reasoning_parser", "speculative_config", "stream_interval"})


def connector(config: DeploymentConfig, connections: NativeConnections, switch_dir: Path | None) -> Connect:
    """Return how to call a deployment's instances; ``switch_dir`` stores the roles of vLLM instances."""
    if config.engine != "vllm":
        return lambda name, url, role=None: NativeInstance(connections, name, url)  # it reports its own role
    placement = config.placement()
    used = Connectors.between(placement, config.vllm.kv)
    targets = {
        one.name: VllmTarget(
            role=one.role,
            device=",".join(one.devices),
            dtype=config.dtype,
            model_path=str(Path(config.checkpoint).expanduser()),
            connectors=used,
            continues=_NOT_RESUMABLE.isdisjoint(config.settings_for(str(one.role)).engine_args),
        )
        for one in placement
    }
    return VllmInstances(connections, targets, switch_dir).connect
