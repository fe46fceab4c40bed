"""Processes that start together, live together and end together."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import defaultdict
from collections.abc import Coroutine, Iterable
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from epd_serve.config.sections import HANG_TIMEOUT_S
from epd_serve.errors import InstanceUnreachable, ServeError
from epd_serve.launch.processes.forking import end_idle_server
from epd_serve.launch.processes.process import ProcessDied, ProcessSpec, ProcessState, RunningProcess, spawn
from epd_serve.lifeline import CLEAN_UP_S
from epd_serve.protocol.instance_state import RESTARTS
from epd_serve.rpc.http import HttpPool, HttpServer
from epd_serve.rpc.tls import tls_files

_Result = TypeVar("_Result")
#: Time to finish: of the gateway with its requests, then of the instances, last of the services that they use.
GRACES_S = {"first": 5.5, "then": 3.5, "last": 0.5}
_POLL_INTERVAL_S, _POLL_TIMEOUT_S = 0.1, 2.0
#: Consecutive failed probes that mean a hang: after a suspension of the machine a single one may fail.
_NUM_PROBES = 3
_GROUP_LOOK_S = 0.02
_ENDED = (ProcessState.STOPPED, ProcessState.DIED, ProcessState.WAITING)


class Backoff(NamedTuple):
    """Delays of restarts: ``first_s``, doubled up to ``limit_s``; reset after ``well_after_s`` of readiness."""

    first_s: float = 1.0
    limit_s: float = 30.0
    well_after_s: float = 60.0


class Supervisor:
    """Runs processes until :meth:`stop` is called.

    ::

        supervisor = Supervisor(specs, log_dir)
        try:
            await supervisor.start()
            await supervisor.wait_ready()
            raise await supervisor.wait_failure()
        finally:
            await supervisor.stop()

    With ``restart``, a process that ends after it was ready is restarted, while the others keep running. A process
    that ends before it was ready has failed for good. A ready process without an answer for ``hang_timeout_s`` is
    killed, which counts as its death. A subclass overrides :meth:`on_change` and :meth:`on_death` to follow them.

    It must be used from one event loop whose thread outlives the processes (see :mod:`epd_serve.lifeline`).

    Attributes:
        num_deaths: number of unexpected ends so far.
    """

    def __init__(
        self,
        specs: Iterable[ProcessSpec],
        log_dir: Path,
        *,
        restart: bool = True,
        hang_timeout_s: float = HANG_TIMEOUT_S,
        backoff: Backoff = Backoff(),  # noqa: B008 - immutable
    ) -> None:
        self.log_dir = log_dir
        self._restart = restart
        self._hang_timeout_s = hang_timeout_s
        self._backoff = backoff
        self._processes = [Process(spec, self) for spec in specs]
        self._lives: dict[Process, asyncio.Task[ProcessDied]] = {}
        self._measuring: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by device
        self._failed = asyncio.Event()
        self._failure: asyncio.Task[ProcessDied] | None = None
        self._retiring: list[asyncio.Task[None]] = []
        self.num_deaths = 0

    def on_change(self, process: Process) -> None:
        """Follow a process's changes of state."""

    def on_death(self, death: ProcessDied, delay_s: float) -> None:
        """Follow the deaths of processes, which are restarted after ``delay_s``."""

    @property
    def processes(self) -> tuple[Process, ...]:
        """The processes in the order of their specs; added ones come before the gateway."""
        return tuple(one for one in self._processes if not one.is_retired)

    def process(self, name: str) -> Process:
        return next(one for one in self.processes if one.spec.name == name)

    async def start(self) -> None:
        """Start all processes.

        Each waits for the processes with a ``ready_file``, and for the previous one that measures the same device.
        """
        first = [one for one in self._processes if one.spec.ready_file is not None]
        measuring: dict[str, Process] = {}
        for process in self._processes:
            after = [] if process in first else first
            after = [*after, *(measuring[device] for device in process.spec.measures if device in measuring)]
            measuring |= dict.fromkeys(process.spec.measures, process)
            self._watch(process, after)

    async def wait_ready(self, timeout_s: float | None = None) -> None:
        """Return when every process is ready. Raises ProcessDied, or TimeoutError after ``timeout_s``."""

        async def all_ready() -> None:
            for process in self.processes:
                await process.ready.wait()

        try:
            async with asyncio.timeout(timeout_s):
                await run_until(self._failed, all_ready())
        except TimeoutError:
            late = ", ".join(one.spec.name for one in self.processes if not one.ready.is_set())
            raise TimeoutError(f"not ready after {timeout_s:g} s: {late}") from None
        if self._failure is not None:
            raise self._failure.result()

    async def wait_failure(self) -> ProcessDied:
        """Return the first death of a process without a restart."""
        await self._failed.wait()
        assert self._failure is not None
        return self._failure.result()

    async def add(self, spec: ProcessSpec, timeout_s: float) -> Process:
        """Start one more process; return when it is ready.

        Raises ProcessDied, TimeoutError after ``timeout_s``, or OSError; the process is then gone.
        """
        process = Process(spec, self)
        gateways = (i for i, one in enumerate(self._processes) if one.spec.stops == "first")
        self._processes.insert(next(gateways, len(self._processes)), process)
        try:
            async with asyncio.timeout(timeout_s):
                await self._start(process)
        except BaseException as error:
            self.num_deaths += isinstance(error, ProcessDied)
            await asyncio.shield(process.stop())
            self._processes.remove(process)
            raise
        self._watch(process)
        return process

    async def remove(self, name: str) -> None:
        """Stop one process without counting a failure or restarting it."""
        process = self.process(name)
        await _cancel(self._lives.pop(process))
        await asyncio.shield(process.stop())
        self._processes.remove(process)

    async def replace(self, spec: ProcessSpec, timeout_s: float) -> None:
        """Replace the process of the same name; return when the new one is ready.

        The old one finishes its work (SIGQUIT), without a time limit. Raises as :meth:`add`; the old one then
        stays.
        """
        old = self.process(spec.name)
        await self.add(spec, timeout_s)
        await _cancel(self._lives.pop(old))
        old.retire()
        self._retiring.append(asyncio.create_task(old.wait_end()))

    async def stop(self) -> None:
        """End all processes, turn by turn, within 10 s or the longest ``grace_s`` of each turn."""
        await _cancel(*self._lives.values())  # ends restarts
        for turn in GRACES_S:
            await asyncio.gather(*(one.stop() for one in self._processes if one.spec.stops == turn))
        await asyncio.gather(*self._retiring)

    def kill(self) -> None:
        """Kill all processes. :meth:`stop` must still be awaited."""
        for life in self._lives.values():
            life.cancel()
        for process in self._processes:
            process.kill()

    def _watch(self, process: Process, after: Iterable[Process] = ()) -> None:
        self._lives[process] = life = asyncio.create_task(self._keep_alive(process, after))
        life.add_done_callback(self._end_life)

    def _end_life(self, life: asyncio.Task[ProcessDied]) -> None:
        if not life.cancelled() and self._failure is None:
            self._failure = life
            self._failed.set()

    async def _start(self, process: Process) -> None:
        """Start a process and return when it is ready; none that measures its devices starts meanwhile."""
        async with AsyncExitStack() as turn:
            for device in sorted(process.spec.measures):
                await turn.enter_async_context(self._measuring[device])
            await process.start()
            await process.wait_ready()

    async def _keep_alive(self, process: Process, after: Iterable[Process]) -> ProcessDied:
        """Start a process when those in ``after`` are ready, and restart it; return its last death."""
        for other in after:
            await other.ready.wait()
        delay_s, was_ready = self._backoff.first_s, process.ready.is_set()
        while True:
            ready_s = 0.0
            try:
                if not process.ready.is_set():
                    await self._start(process)
                was_ready = True
                ready_s = await process.wait_end_or_hang(self._hang_timeout_s)
                death = process.death()
            except ProcessDied as early:
                death = early
            except OSError as error:  # no such program, or no memory for a process at the moment
                death = ProcessDied(process.spec.name, str(error), process.log_file)
            self.num_deaths += 1
            with suppress(OSError), process.log_file.open("a", encoding="utf-8") as log:  # a full disk
                log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {death.end}\n")
            if not (self._restart and was_ready):
                return death
            process.enter(ProcessState.WAITING)
            if ready_s >= self._backoff.well_after_s:
                delay_s = self._backoff.first_s
            self.on_death(death, delay_s)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, self._backoff.limit_s)


class Process:
    """A supervised child process in a session of its own, so that a terminal's Ctrl-C does not reach it.

    Attributes:
        log_file: the file for its output, across restarts.
        state: STARTING before its start, too.
        ready: set while it is ready.
        is_retired: whether another process has replaced it, and it only finishes its requests.
    """

    def __init__(self, spec: ProcessSpec, supervisor: Supervisor) -> None:
        self.spec = spec
        self.log_file = supervisor.log_dir / f"{spec.name}.log"
        self.state = ProcessState.STARTING
        self.ready = asyncio.Event()
        self.num_starts = 0
        self.is_retired = False
        self._supervisor = supervisor
        self._starting: asyncio.Future[RunningProcess] | None = None
        self._process: RunningProcess | None = None
        self._health = spec.first_health
        self._started_at = self._ready_at = time.monotonic()
        self._hung = ""

    @property
    def num_restarts(self) -> int:
        return max(0, self.num_starts - 1)

    @property
    def pid(self) -> int:
        assert self._process is not None, "the process was not started"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def elapsed_s(self) -> float:
        """Seconds from the last start until it was ready, or until now."""
        return (self._ready_at if self.ready.is_set() else time.monotonic()) - self._started_at

    def enter(self, state: ProcessState) -> None:
        self.state = state
        self._supervisor.on_change(self)

    async def start(self) -> None:
        """Start the process, or restart it after its death. Raises OSError."""
        self._started_at, self._hung = time.monotonic(), ""
        self.enter(ProcessState.STARTING)
        environment = {**self.spec.environment, RESTARTS: str(self.num_starts)}
        spec = replace(self.spec, environment=environment)
        self._starting = asyncio.ensure_future(spawn(spec, self.log_file))
        self._process = await asyncio.shield(self._starting)
        self.num_starts += 1

    async def wait_ready(self) -> None:
        """Return when ``GET /health`` answers 200. Raises ProcessDied if the process ends before."""
        while (status := await self._ask(_POLL_TIMEOUT_S)) != 200:
            if self.state is ProcessState.STARTING and status is not None:  # it listens
                self.enter(ProcessState.LOADING)
            if await self._ends_within(_POLL_INTERVAL_S):
                raise self.death()
        self._ready_at, self._health = time.monotonic(), "/health"
        self.ready.set()
        self.enter(ProcessState.READY)

    async def wait_end_or_hang(self, hang_timeout_s: float) -> float:
        """Return when the process has ended, with the seconds for which it was ready.

        Kills it if it answers nothing for ``hang_timeout_s``.
        """
        probe_s, num_failed = hang_timeout_s / _NUM_PROBES, 0
        while self.is_running:
            started = time.monotonic()
            num_failed = 0 if await self._ask(probe_s) else num_failed + 1
            if num_failed == _NUM_PROBES and self.is_running:
                self._hung = f"it answered nothing for {hang_timeout_s:g} s and was killed"
                self.kill()
            await self._ends_within(max(0.0, started + probe_s - time.monotonic()))
        await self.wait_end()
        return time.monotonic() - self._ready_at

    async def _ends_within(self, timeout_s: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.wait_end()
                return True
        return False

    async def wait_end(self) -> None:
        """Return when the process and its children have ended."""
        assert self._process is not None
        await self._process.wait()
        if self.state in _ENDED:
            return
        self.ready.clear()
        with suppress(ProcessLookupError):  # the rest of its group, before its id is reused
            deadline = time.monotonic() + CLEAN_UP_S + 1.0
            while self.spec.is_group and time.monotonic() < deadline:  # its group ends with it
                os.killpg(self.pid, 0)
                await asyncio.sleep(_GROUP_LOOK_S)
            os.killpg(self.pid, signal.SIGKILL)
        self.enter(ProcessState.STOPPED if self.state is ProcessState.STOPPING else ProcessState.DIED)

    def retire(self) -> None:
        """Let a replaced process finish its requests, without a time limit, and end."""
        self.is_retired = True
        self._signal(signal.SIGQUIT)

    async def stop(self) -> None:
        """Ask the process to end (SIGTERM), and kill it after the seconds of its spec or of its turn.

        An instance that is not ready is killed at once, as it has nothing to finish.
        """
        if self._starting is not None:  # a cancelled start continues
            if self.spec.can_fork and not self._starting.done():
                end_idle_server()  # its imports can take long
            with suppress(OSError):
                self._process = await self._starting
        if self._process is None:
            self.state = ProcessState.STOPPED
            return
        if self.state is ProcessState.WAITING:
            self.enter(ProcessState.STOPPED)
        if self.is_running and self.state is not ProcessState.STOPPING:
            has_work = self.ready.is_set() or self.spec.stops != "then"
            self._signal(signal.SIGTERM if has_work else signal.SIGKILL)
        if not await self._ends_within(self.spec.grace_s or GRACES_S[self.spec.stops]):
            self.kill()
            await self.wait_end()

    def _signal(self, number: signal.Signals) -> None:
        self.enter(ProcessState.STOPPING)
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process and its children."""
        if self.is_running:
            with suppress(ProcessLookupError):
                (os.kill if self.spec.is_group else os.killpg)(self.pid, signal.SIGKILL)

    def death(self) -> ProcessDied:
        """Return the exit code or signal, and the end of the log."""
        assert self._process is not None
        code = self._process.returncode
        assert code is not None, "the process is still running"
        how = f"exit code {code}" if code >= 0 else self._hung or f"killed by {signal.Signals(-code).name}"
        if self.spec.can_fork and code > 0 and not self.log_file.exists():  # it failed before its own code ran
            how += "; guard your script with 'if __name__ == \"__main__\":' (error above)"
        return ProcessDied(self.spec.name, how, self.log_file)

    async def _ask(self, timeout_s: float) -> int | None:
        """Return the status of ``GET /health``; 0 without an answer, None if no server listens."""
        if not self.spec.url:
            return 200 if self.spec.ready_file is None or self.spec.ready_file.exists() else None
        path = self.spec.socket
        url, tls = (self.spec.url, tls_files(self.spec.environment)) if path is None else ("http://socket", None)
        async with HttpPool(tls, path) as pool:
            try:
                async with asyncio.timeout(timeout_s):
                    answer = await HttpServer(self.spec.name, url, pool).send("GET", self._health)
            except InstanceUnreachable:
                return None
            except (ServeError, TimeoutError):
                return 0
            answer.close()
            return answer.status


async def run_until(stop: asyncio.Event, work: Coroutine[Any, Any, _Result]) -> _Result | None:
    """Return the result of ``work``, or None if ``stop`` is set first."""
    tasks = [asyncio.create_task(work), asyncio.create_task(stop.wait())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        await _cancel(*tasks)


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
