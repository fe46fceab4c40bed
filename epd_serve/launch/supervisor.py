"""A set of processes that start together, live together and end together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from epd_serve.launch.backoff import Backoff
from epd_serve.launch.process import ManagedProcess, ProcessDied, ProcessSpec, ProcessState

#: What a process that stops first gets to finish its requests, and what the others get; both within 10 s.
FIRST_GRACE_S = 5.5
OTHERS_GRACE_S = 3.5


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

    With ``restart``, a process that had been ready once and ends by itself is started again, while the others go
    on. One that was never ready has died for good: what it lacks it will lack the next time.

    It must be used from one event loop whose thread outlives the processes (see :mod:`epd_serve.launch.lifeline`).

    Args:
        on_change: told of each change of a process's state.
        on_death: told of each death after which the process is started again, and in how many seconds.

    Attributes:
        num_deaths: how many processes have ended by themselves so far.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        log_dir: Path,
        *,
        restart: bool = True,
        backoff: Callable[[], Backoff] = Backoff,
        on_change: Callable[[ManagedProcess], None] = lambda process: None,
        on_death: Callable[[ProcessDied, float], None] = lambda death, delay_s: None,
    ) -> None:
        self._specs = tuple(specs)
        self._log_dir = log_dir
        self._restart = restart
        self._backoff = backoff
        self._on_change = on_change
        self._on_death = on_death
        self._processes: list[ManagedProcess] = []
        self._watches: list[asyncio.Task[ProcessDied]] = []
        self.num_deaths = 0

    @property
    def processes(self) -> tuple[ManagedProcess, ...]:
        """The started processes, in the order of their specs."""
        return tuple(self._processes)

    async def start(self) -> None:
        """Start all processes; returns before they are ready."""
        for spec in self._specs:
            process = await ManagedProcess.start(spec, self._log_dir, self._on_change)
            self._processes.append(process)
            self._watches.append(asyncio.create_task(self._watch(process)))

    async def wait_ready(self, timeout_s: float | None = None) -> None:
        """Return when every process is ready.

        Raises:
            ProcessDied: one of them ended for good instead.
            TimeoutError: ``timeout_s`` passed before.
        """
        failure = asyncio.create_task(self.wait_failure())
        all_ready = asyncio.gather(*(process.ready.wait() for process in self._processes))
        either: set[asyncio.Future[Any]] = {all_ready, failure}
        try:
            done, _ = await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if failure in done:
                raise failure.result()
            if not done:
                late = ", ".join(p.spec.name for p in self._processes if not p.ready.is_set())
                raise TimeoutError(f"not ready after {timeout_s:g} s: {late}")
        finally:
            for task in either:
                task.cancel()
            await asyncio.gather(*either, return_exceptions=True)

    async def wait_failure(self) -> ProcessDied:
        """Return when a process has died for good, with which and why."""
        done, _ = await asyncio.wait(self._watches, return_when=asyncio.FIRST_COMPLETED)
        return next(watch for watch in self._watches if watch in done).result()

    async def stop(self) -> None:
        """End all processes within 10 s: first those that stop first, then the others together."""
        await self._end_watches()
        for stops_first, grace_s in ((True, FIRST_GRACE_S), (False, OTHERS_GRACE_S)):
            chosen = [process for process in self._processes if process.spec.stops_first is stops_first]
            await asyncio.gather(*(process.stop(grace_s) for process in chosen))

    def kill(self) -> None:
        """End all processes at once, without a chance to finish anything. :meth:`stop` must still be awaited."""
        for watch in self._watches:
            watch.cancel()
        for process in self._processes:
            process.kill()

    async def _end_watches(self) -> None:
        """From now on no process is started again."""
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)

    async def _watch(self, process: ManagedProcess) -> ProcessDied:
        """Until the process has died for good; how it did."""
        backoff, was_ready = self._backoff(), False
        async with aiohttp.ClientSession(trust_env=False) as session:
            while True:
                try:
                    await process.wait_ready(session)
                    was_ready = True
                    await process.wait_end()
                    death = process.death()
                except ProcessDied as early:
                    death = early
                self.num_deaths += 1
                if not (self._restart and was_ready):
                    return death
                ready_s = process.ready_s
                process.wait_for_restart()
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
