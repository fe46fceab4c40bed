"""A set of processes that start together, live together and end together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from epd_serve.config.sections import HANG_TIMEOUT_S
from epd_serve.launch.processes.process import ManagedProcess, ProcessDied, ProcessSpec, ProcessState

_Result = TypeVar("_Result")
#: Time to finish: of the gateway with its requests, then of the instances, last of the services that they use.
GRACES_S = {"first": 5.5, "then": 3.5, "last": 0.5}


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
            supervisor.start()
            await supervisor.wait_ready()
            raise await supervisor.wait_failure()
        finally:
            await supervisor.stop()

    With ``restart``, a process that ends after it was ready is restarted, while the others keep running. A process
    that ends before it was ready has failed for good. A ready process without an answer for ``hang_timeout_s`` is
    killed, which counts as its death.

    It must be used from one event loop whose thread outlives the processes (see :mod:`epd_serve.lifeline`).

    Args:
        on_change: called at each change of a process's state.
        on_death: called with each death, and the delay of the restart.

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
        on_change: Callable[[ManagedProcess], None] = lambda process: None,
        on_death: Callable[[ProcessDied, float], None] = lambda death, delay_s: None,
    ) -> None:
        self._log_dir = log_dir
        self._restart = restart
        self._hang_timeout_s = hang_timeout_s
        self._backoff = backoff
        self._on_change = on_change
        self._on_death = on_death
        self._processes = [ManagedProcess(spec, log_dir, on_change) for spec in specs]
        self._lives: dict[ManagedProcess, asyncio.Task[ProcessDied]] = {}
        self._changed = asyncio.Event()
        self._retiring: list[asyncio.Task[None]] = []
        self.num_deaths = 0

    @property
    def processes(self) -> tuple[ManagedProcess, ...]:
        """The processes in the order of their specs; added ones come before the gateway."""
        return tuple(one for one in self._processes if not one.is_retired)

    def start(self) -> None:
        """Start all processes.

        Each waits for the processes with a ``ready_file``, and for the previous one that measures the same device.
        """
        first = [one for one in self._processes if one.spec.ready_file is not None]
        measuring: dict[str, ManagedProcess] = {}
        for process in self._processes:
            after = [] if process in first else first
            after = [*after, *(measuring[device] for device in process.spec.measures if device in measuring)]
            measuring |= dict.fromkeys(process.spec.measures, process)
            self._lives[process] = asyncio.create_task(self._live(process, after))

    async def wait_ready(self, timeout_s: float | None = None) -> None:
        """Return when every process is ready. Raises ProcessDied, or TimeoutError after ``timeout_s``."""
        all_ready = asyncio.gather(*(process.ready.wait() for process in self.processes))
        failure = asyncio.create_task(self.wait_failure())
        try:
            await asyncio.wait((all_ready, failure), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if failure.done():
                raise failure.result()
            if not all_ready.done():
                late = ", ".join(one.spec.name for one in self.processes if not one.ready.is_set())
                raise TimeoutError(f"not ready after {timeout_s:g} s: {late}")
        finally:
            all_ready.cancel()
            failure.cancel()
            with suppress(asyncio.CancelledError):
                await all_ready

    async def wait_failure(self) -> ProcessDied:
        """Return the first death of a process without a restart."""
        while True:
            changed = asyncio.create_task(self._changed.wait())
            try:
                await asyncio.wait({*self._lives.values(), changed}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()
            for life in self._lives.values():
                if life.done():
                    return life.result()

    async def add(self, spec: ProcessSpec, timeout_s: float) -> ManagedProcess:
        """Start one more process; return when it is ready.

        Raises ProcessDied, TimeoutError after ``timeout_s``, or OSError; the process is then gone.
        """
        process = ManagedProcess(spec, self._log_dir, self._on_change)
        gateways = (i for i, one in enumerate(self._processes) if one.spec.stops == "first")
        self._processes.insert(next(gateways, len(self._processes)), process)
        try:
            async with asyncio.timeout(timeout_s):
                await process.start()
                await process.wait_ready()
        except BaseException as error:
            self.num_deaths += isinstance(error, ProcessDied)
            await asyncio.shield(_stop(process))
            self._processes.remove(process)
            raise
        self._lives[process] = asyncio.create_task(self._live(process))
        self._wake_waiters()
        return process

    async def remove(self, name: str) -> None:
        """Stop one process without counting a failure or restarting it."""
        process = next(one for one in self.processes if one.spec.name == name)
        await self._leave_alone(process)
        await asyncio.shield(_stop(process))
        self._processes.remove(process)

    async def replace(self, spec: ProcessSpec, timeout_s: float) -> None:
        """Replace the process of the same name; return when the new one is ready.

        The old one finishes its work (SIGQUIT), without a time limit. Raises as :meth:`add`; the old one then
        stays.
        """
        old = next(one for one in self.processes if one.spec.name == spec.name)
        await self.add(spec, timeout_s)
        await self._leave_alone(old)
        old.retire()
        self._retiring.append(asyncio.create_task(old.wait_end()))

    async def _leave_alone(self, process: ManagedProcess) -> None:
        """Stop watching a process, so that its end does not count as a failure."""
        life = self._lives.pop(process)
        self._wake_waiters()
        await _cancel([life])

    def _wake_waiters(self) -> None:
        """Let :meth:`wait_failure` see the current processes."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def stop(self) -> None:
        """End all processes, turn by turn, within 10 s or the longest ``grace_s`` of each turn."""
        await _cancel(list(self._lives.values()))  # ends restarts
        for turn in GRACES_S:
            await asyncio.gather(*(_stop(process) for process in self._processes if process.spec.stops == turn))
        await asyncio.gather(*self._retiring)

    def kill(self) -> None:
        """Kill all processes. :meth:`stop` must still be awaited."""
        for life in self._lives.values():
            life.cancel()
        for process in self._processes:
            process.kill()

    async def _live(self, process: ManagedProcess, after: Iterable[ManagedProcess] = ()) -> ProcessDied:
        """Start a process when those in ``after`` are ready, and restart it; return its last death."""
        for other in after:
            await other.ready.wait()
        delay_s, was_ready = self._backoff.first_s, process.ready.is_set()
        while True:
            ready_s = 0.0
            try:
                if not process.is_running:
                    await process.start()
                if not process.ready.is_set():
                    await process.wait_ready()
                was_ready = True
                ready_s = await process.wait_end_or_hang(self._hang_timeout_s)
                death = process.death()
            except ProcessDied as early:
                death = early
            except OSError as error:  # no such program, or no memory for a process at the moment
                death = ProcessDied(process.spec.name, str(error), [], process.log_file)
            self.num_deaths += 1
            with suppress(OSError), process.log_file.open("a", encoding="utf-8") as log:  # a full disk
                log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {death.end}\n")
            if not (self._restart and was_ready):
                return death
            process.enter(ProcessState.WAITING)
            if ready_s >= self._backoff.well_after_s:
                delay_s = self._backoff.first_s
            self._on_death(death, delay_s)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, self._backoff.limit_s)


async def run_until(stop: asyncio.Event, work: Coroutine[Any, Any, _Result]) -> _Result | None:
    """Return the result of ``work``, or None if ``stop`` is set first."""
    tasks = [asyncio.create_task(work), asyncio.create_task(stop.wait())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        await _cancel(tasks)


async def _stop(process: ManagedProcess) -> None:
    await process.stop(process.spec.grace_s or GRACES_S[process.spec.stops])


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:  # repeatedly: wait_for() may swallow a cancellation when its process ends just then
            task.cancel()
        await asyncio.wait(pending, timeout=0.1)
    await asyncio.gather(*tasks, return_exceptions=True)
