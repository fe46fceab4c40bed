"""A set of processes that start together, live together and end together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from epd_serve.launch.process import ManagedProcess, ProcessDied, ProcessSpec

#: What a process that stops first gets to finish its requests, and what the others get; both within 10 s.
FIRST_GRACE_S = 5.5
OTHERS_GRACE_S = 3.5


class Supervisor:
    """Runs processes until one dies or :meth:`stop` is called; then none is left.

    ::

        supervisor = Supervisor(specs, log_dir)
        try:
            await supervisor.start()
            await supervisor.wait_ready()
            raise await supervisor.wait_failure()
        finally:
            await supervisor.stop()

    It must be used from one event loop whose thread outlives the processes (see :mod:`epd_serve.launch.lifeline`).
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        log_dir: Path,
        *,
        on_change: Callable[[ManagedProcess], None] = lambda process: None,
    ) -> None:
        self._specs = tuple(specs)
        self._log_dir = log_dir
        self._on_change = on_change
        self._processes: list[ManagedProcess] = []

    @property
    def processes(self) -> tuple[ManagedProcess, ...]:
        """The started processes, in the order of their specs."""
        return tuple(self._processes)

    async def start(self) -> None:
        """Start all processes; returns before they are ready."""
        for spec in self._specs:
            self._processes.append(await ManagedProcess.start(spec, self._log_dir, self._on_change))

    async def wait_ready(self, timeout_s: float | None = None) -> None:
        """Return when every process is ready.

        Raises:
            ProcessDied: one of them ended instead.
            TimeoutError: ``timeout_s`` passed before.
        """
        async with aiohttp.ClientSession(trust_env=False) as session:
            waits = [asyncio.create_task(process.wait_ready(session)) for process in self._processes]
            failure = asyncio.create_task(self.wait_failure())
            all_ready = asyncio.gather(*waits)
            either: set[asyncio.Future[Any]] = {all_ready, failure}
            try:
                done, _ = await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                if failure in done:
                    raise failure.result()
                if not done:
                    late = ", ".join(p.spec.name for p in self._processes if p.ready_after_s is None)
                    raise TimeoutError(f"not ready after {timeout_s:g} s: {late}")
                all_ready.result()
            finally:
                for task in (*waits, failure):
                    task.cancel()
                await asyncio.gather(*waits, failure, all_ready, return_exceptions=True)

    async def wait_failure(self) -> ProcessDied:
        """Return when a process has ended by itself, with which and why."""
        ends = {asyncio.create_task(process.wait_end()): process for process in self._processes}
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return next(process for end, process in ends.items() if end in done).death()
        finally:
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)

    async def stop(self) -> None:
        """End all processes within 10 s: first those that stop first, then the others together."""
        for stops_first, grace_s in ((True, FIRST_GRACE_S), (False, OTHERS_GRACE_S)):
            chosen = [process for process in self._processes if process.spec.stops_first is stops_first]
            await asyncio.gather(*(process.stop(grace_s) for process in chosen))

    def kill(self) -> None:
        """End all processes at once, without a chance to finish anything. :meth:`stop` must still be awaited."""
        for process in self._processes:
            process.kill()
