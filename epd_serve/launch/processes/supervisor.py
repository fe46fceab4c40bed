"""A set of processes that start together, live together and end together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epd_serve.config.sections import HANG_TIMEOUT_S
from epd_serve.launch.processes.process import (
    ManagedProcess,
    ProcessDied,
    ProcessSpec,
    ProcessState,
    Starter,
    spawn,
)

#: What processes get to finish: requests first, then the stages, last what these have used; all within 10 s.
GRACES_S = {"first": 5.5, "then": 3.5, "last": 0.5}


_MAX_DOUBLINGS = 32
#: Until a process is ready for which the others wait.
_FIRST_S = 30.0


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


class Supervisor:
    """Runs processes until :meth:`stop` is called or one has died for good; then none is left.

    ::

        supervisor = Supervisor(specs, log_dir)
        try:
            await supervisor.start()
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
        start: starts a process; all are started at once, but for those that measure the same device.

    Attributes:
        num_deaths: number of processes that have ended by themselves so far.
        has_started: whether all of the first processes have been started.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        log_dir: Path,
        *,
        restart: bool = True,
        hang_timeout_s: float = HANG_TIMEOUT_S,
        backoff: Callable[[], Backoff] = Backoff,
        on_change: Callable[[ManagedProcess], None] = lambda process: None,
        on_death: Callable[[ProcessDied, float], None] = lambda death, delay_s: None,
        start: Starter = spawn,
    ) -> None:
        self._specs = tuple(specs)
        self._log_dir = log_dir
        self._restart = restart
        self._hang_timeout_s = hang_timeout_s
        self._backoff = backoff
        self._on_change = on_change
        self._on_death = on_death
        self._start = start
        self._processes: list[ManagedProcess] = []
        self._watches: dict[str, asyncio.Task[ProcessDied]] = {}
        self._changed = asyncio.Event()
        self._turns: list[asyncio.Task[None]] = []
        self._retiring: list[asyncio.Task[None]] = []
        self.num_deaths = 0
        self.has_started = False

    @property
    def processes(self) -> tuple[ManagedProcess, ...]:
        """The started processes, in the order of their specs; those that were added come before the gateway."""
        return tuple(one for one in self._processes if not one.is_retired)

    async def start(self) -> None:
        """Start all processes but those that have to wait for their turn; returns before any of them is ready.

        Those with a ``ready_file`` come first, and are ready. Raises ProcessDied or TimeoutError where one is not.
        """
        for spec in self._specs:
            if spec.ready_file is not None:
                await self.add(spec, _FIRST_S)
        groups = in_turns([spec for spec in self._specs if spec.ready_file is None])
        starting = [
            asyncio.create_task(ManagedProcess.start(spec, self._log_dir, self._on_change, self._start))
            for spec, *_ in groups
        ]
        try:
            if starting:
                await asyncio.wait(starting)
        finally:
            for task in starting:
                task.cancel()
            results = await asyncio.gather(*starting, return_exceptions=True)
            started = [result for result in results if isinstance(result, ManagedProcess)]
            self._processes += started
            for process in started:
                self._watches[process.spec.name] = asyncio.create_task(self._watch(process))
        for task in starting:
            task.result()
        self._turns = [asyncio.create_task(self._start_in_turn(group)) for group in groups if len(group) > 1]
        self.has_started = True

    async def _start_in_turn(self, specs: Sequence[ProcessSpec]) -> None:
        """Start each of ``specs`` but the first, which has started, once the one before it is ready."""
        before = next(one for one in self._processes if one.spec.name == specs[0].name)
        for spec in specs[1:]:
            is_ready = asyncio.create_task(before.ready.wait())
            watch = self._watches[before.spec.name]
            await asyncio.wait({is_ready, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not is_ready.done():  # it has died for good
                is_ready.cancel()
                return
            before = await self._insert(spec)
            self._watches[spec.name] = asyncio.create_task(self._watch(before))
            self._tell_changed()

    async def _insert(self, spec: ProcessSpec) -> ManagedProcess:
        """Start one more process; its place is before those that stop first."""
        process = await ManagedProcess.start(spec, self._log_dir, self._on_change, self._start)
        place = next((i for i, one in enumerate(self._processes) if one.spec.stops == "first"), None)
        self._processes.insert(len(self._processes) if place is None else place, process)
        return process

    async def _all_ready(self) -> None:
        await asyncio.gather(*self._turns)
        await asyncio.gather(*(process.ready.wait() for process in self._processes))

    async def wait_ready(self, timeout_s: float | None = None) -> None:
        """Return when every process is ready.

        Raises:
            ProcessDied: one of them ended for good instead.
            TimeoutError: ``timeout_s`` passed before.
        """
        failure = asyncio.create_task(self.wait_failure())
        all_ready = asyncio.create_task(self._all_ready())
        either: set[asyncio.Future[Any]] = {all_ready, failure}
        try:
            done, _ = await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if failure in done:
                raise failure.result()
            if all_ready in done:
                all_ready.result()
            if not done:
                ready = {one.spec.name for one in self._processes if one.ready.is_set()}
                late = ", ".join(spec.name for spec in self._specs if spec.name not in ready)
                raise TimeoutError(f"not ready after {timeout_s:g} s: {late}")
        finally:
            for task in either:
                task.cancel()
            await asyncio.gather(*either, return_exceptions=True)

    async def wait_failure(self) -> ProcessDied:
        """Return when a process has died for good, with which and why."""
        while True:
            changed = asyncio.create_task(self._changed.wait())
            try:
                await asyncio.wait({*self._watches.values(), changed}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()
            for watch in list(self._watches.values()):
                if watch.done():
                    return watch.result()

    async def add(self, spec: ProcessSpec, timeout_s: float) -> ManagedProcess:
        """Start one more process; returns when it is ready.

        Raises:
            ProcessDied: it ended instead. The others go on.
            TimeoutError: it was not ready in time, and was ended.
            OSError: it cannot be started now.
        """
        process = await self._insert(spec)
        try:
            async with asyncio.timeout(timeout_s):
                await process.wait_ready()
        except BaseException as error:
            self.num_deaths += isinstance(error, ProcessDied)
            await asyncio.shield(_stop(process))
            self._processes.remove(process)
            raise
        self._watches[spec.name] = asyncio.create_task(self._watch(process, was_ready=True))
        self._tell_changed()
        return process

    async def remove(self, name: str) -> None:
        """End one process; it is no failure, and it is not started again."""
        process = next(one for one in self._processes if one.spec.name == name)
        watch = self._watches.pop(name)
        self._tell_changed()
        await _cancel([watch])
        await asyncio.shield(_stop(process))
        self._processes.remove(process)

    async def replace(self, spec: ProcessSpec, timeout_s: float) -> None:
        """Start another process in the place of the one with its name; returns when it is ready.

        The old one is asked to finish what it has (SIGQUIT), and takes the time that this needs. Raises as
        :meth:`add`; the old one goes on then.
        """
        old = next(one for one in self._processes if one.spec.name == spec.name)
        watch = self._watches.pop(spec.name)
        try:
            await self.add(spec, timeout_s)
        except BaseException:
            self._watches[spec.name] = watch
            raise
        await _cancel([watch])
        old.retire()
        self._retiring.append(asyncio.create_task(old.wait_end()))

    def _tell_changed(self) -> None:
        """Let those that wait for a failure look at the present processes."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def stop(self) -> None:
        """End all processes: those that stop first, then the others together, then the last. It takes up to 10 s,
        or as long as one has that has a time of its own."""
        await _cancel(self._turns)
        await _cancel(list(self._watches.values()))  # from now on no process is started again
        for turn in GRACES_S:
            chosen = [process for process in self._processes if process.spec.stops == turn]
            await asyncio.gather(*(_stop(process) for process in chosen))
        await asyncio.gather(*self._retiring)

    def kill(self) -> None:
        """End all processes at once, without a chance to finish anything. :meth:`stop` must still be awaited."""
        for task in (*self._turns, *self._watches.values()):
            task.cancel()
        for process in self._processes:
            process.kill()

    async def _watch(self, process: ManagedProcess, *, was_ready: bool = False) -> ProcessDied:
        """Wait until the process has died for good; return its last death."""
        backoff = self._backoff()
        while True:
            try:
                if not process.ready.is_set():
                    await process.wait_ready()
                was_ready = True
                await process.wait_end_or_hang(self._hang_timeout_s)
                death = process.death()
            except ProcessDied as early:
                death = early
            self.num_deaths += 1
            process.note(death)
            if not (self._restart and was_ready):
                return death
            ready_s = process.ready_s
            process.enter(ProcessState.WAITING)
            while process.state is ProcessState.WAITING:
                delay_s = backoff.next_delay_s(ready_s)
                self._on_death(death, delay_s)
                await asyncio.sleep(delay_s)
                try:
                    await process.restart()
                except OSError as error:  # no memory for a process, say: that passes
                    name, log_file = process.spec.name, process.log_file
                    death = ProcessDied(name=name, how=str(error), log_tail=[], log_file=log_file)
                    ready_s = 0.0


def in_turns(specs: Sequence[ProcessSpec]) -> list[list[ProcessSpec]]:
    """Group the specs that measure a common device, directly or over others; the order stays."""
    groups: list[list[ProcessSpec]] = []
    for spec in specs:
        same = [group for group in groups if any(spec.measures & one.measures for one in group)]
        groups = [group for group in groups if group not in same]
        groups.append([*(one for group in same for one in group), spec])
    return groups


async def _stop(process: ManagedProcess) -> None:
    """End a process within the time of its own, or else that of its turn."""
    await process.stop(process.spec.grace_s or GRACES_S[process.spec.stops])


async def _cancel(watches: Sequence[asyncio.Task[Any]]) -> None:
    while pending := [watch for watch in watches if not watch.done()]:
        for watch in pending:  # again and again: wait_for() may swallow one, when its process ends just then
            watch.cancel()
        await asyncio.wait(pending, timeout=0.1)
    await asyncio.gather(*watches, return_exceptions=True)
