"""A set of processes that start together, live together and end together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from epd_serve.config.sections import HANG_TIMEOUT_S
from epd_serve.launch.processes.process import (
    ManagedProcess,
    ProcessDied,
    ProcessSpec,
    ProcessState,
)

_Result = TypeVar("_Result")
#: Seconds to finish: of the gateway with its requests, then of the stages, last of what these have used.
GRACES_S = {"first": 5.5, "then": 3.5, "last": 0.5}


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
    _next_s: float = 0.0

    def next_delay_s(self, ready_s: float) -> float:
        """Seconds to wait after a death of a process that had been ready for ``ready_s`` seconds."""
        delay_s = self.first_s if ready_s >= self.well_after_s else max(self._next_s, self.first_s)
        self._next_s = min(2 * delay_s, self.limit_s)
        return delay_s


class Supervisor:
    """Runs processes until :meth:`stop` is called or one has died for good; then none is left.

    ::

        supervisor = Supervisor(specs, log_dir)
        try:
            supervisor.start()
            await supervisor.wait_ready()
            raise await supervisor.wait_failure()
        finally:
            await supervisor.stop()

    With ``restart``, a process that was ready once and ends by itself is started again, while the others go on.
    One that was never ready has died for good: what it lacks it will lack the next time. One that was ready and
    answers nothing for ``hang_timeout_s`` is killed, and has died too.

    It must be used from one event loop whose thread outlives the processes (see :mod:`epd_serve.lifeline`).

    Args:
        on_change: called at each change of a process's state.
        on_death: called with each death, and the seconds after which the process is started again.

    Attributes:
        num_deaths: number of processes that have ended by themselves so far.
    """

    def __init__(
        self,
        specs: Iterable[ProcessSpec],
        log_dir: Path,
        *,
        restart: bool = True,
        hang_timeout_s: float = HANG_TIMEOUT_S,
        backoff: Callable[[], Backoff] = Backoff,
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
        """The processes in the order of their specs; those that were added come before the gateway."""
        return tuple(one for one in self._processes if not one.is_retired)

    def start(self) -> None:
        """Start all processes; each waits until those are ready that have a ``ready_file``, and the one before it
        that measures the same device."""
        first = [one for one in self._processes if one.spec.ready_file is not None]
        measuring: dict[str, ManagedProcess] = {}
        for process in self._processes:
            after = [] if process in first else first
            after = [*after, *(measuring[device] for device in process.spec.measures if device in measuring)]
            measuring |= dict.fromkeys(process.spec.measures, process)
            self._lives[process] = asyncio.create_task(self._live(process, after))

    async def wait_ready(self, timeout_s: float | None = None) -> None:
        """Return when every process is ready.

        Raises:
            ProcessDied: one of them ended for good instead.
            TimeoutError: ``timeout_s`` passed before.
        """
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
        """Return when a process has died for good, with which and why."""
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
        """Start one more process; returns when it is ready.

        Raises:
            ProcessDied: it ended instead. The others go on.
            TimeoutError: it was not ready in time, and was ended.
            OSError: it cannot be started now.
        """
        process = ManagedProcess(spec, self._log_dir, self._on_change)
        before = (i for i, one in enumerate(self._processes) if one.spec.stops == "first")
        place = next(before, len(self._processes))
        self._processes.insert(place, process)
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
        self._tell_changed()
        return process

    async def remove(self, name: str) -> None:
        """Stop one process without counting a failure or restarting it."""
        process = next(one for one in self.processes if one.spec.name == name)
        await self._leave_alone(process)
        await asyncio.shield(_stop(process))
        self._processes.remove(process)

    async def replace(self, spec: ProcessSpec, timeout_s: float) -> None:
        """Start another process in the place of the one with its name; returns when it is ready.

        The old one is asked to finish what it has (SIGQUIT), and takes the time that this needs. Raises as
        :meth:`add`; the old one goes on then.
        """
        old = next(one for one in self.processes if one.spec.name == spec.name)
        await self.add(spec, timeout_s)
        await self._leave_alone(old)
        old.retire()
        self._retiring.append(asyncio.create_task(old.wait_end()))

    async def _leave_alone(self, process: ManagedProcess) -> None:
        """Stop watching a process, so that its end does not count as a failure."""
        life = self._lives.pop(process)
        self._tell_changed()
        await _cancel([life])

    def _tell_changed(self) -> None:
        """Let those that wait for a failure look at the present processes."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def stop(self) -> None:
        """End all processes: those that stop first, then the others together, then the last. It takes up to 10 s,
        or as long as one has that has a time of its own."""
        await _cancel(list(self._lives.values()))  # from now on no process is started again
        for turn in GRACES_S:
            await asyncio.gather(*(_stop(process) for process in self._processes if process.spec.stops == turn))
        await asyncio.gather(*self._retiring)

    def kill(self) -> None:
        """End all processes at once, without a chance to finish anything. :meth:`stop` must still be awaited."""
        for life in self._lives.values():
            life.cancel()
        for process in self._processes:
            process.kill()

    async def _live(self, process: ManagedProcess, after: Iterable[ManagedProcess] = ()) -> ProcessDied:
        """Start a process once those of ``after`` are ready, and again when it dies; return its last death."""
        for other in after:
            await other.ready.wait()
        backoff, was_ready = self._backoff(), process.ready.is_set()
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
            except OSError as error:  # no such program, or no memory for a process, which passes
                death = ProcessDied(process.spec.name, str(error), [], process.log_file)
            self.num_deaths += 1
            with suppress(OSError), process.log_file.open("a", encoding="utf-8") as log:  # a full disk
                log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {death.end}\n")
            if not (self._restart and was_ready):
                return death
            process.enter(ProcessState.WAITING)
            delay_s = backoff.next_delay_s(ready_s)
            self._on_death(death, delay_s)
            await asyncio.sleep(delay_s)


async def run_until(stop: asyncio.Event, work: Coroutine[Any, Any, _Result]) -> _Result | None:
    """Return what ``work`` returns, or None where ``stop`` comes first."""
    tasks = [asyncio.create_task(work), asyncio.create_task(stop.wait())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        await _cancel(tasks)


async def _stop(process: ManagedProcess) -> None:
    """End a process within the time of its own, or else that of its turn."""
    await process.stop(process.spec.grace_s or GRACES_S[process.spec.stops])


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:  # again and again: wait_for() may swallow one, when its process ends just then
            task.cancel()
        await asyncio.wait(pending, timeout=0.1)
    await asyncio.gather(*tasks, return_exceptions=True)
