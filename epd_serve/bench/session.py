"""One run from its begin to its end: meet the server, warm up, send, record."""

from __future__ import annotations

import asyncio
import gc
import platform
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter

import aiohttp
import uvloop
from rich.console import Console

from epd_serve import __version__
from epd_serve.bench.client import open_session
from epd_serve.bench.plan import ClosedLoop, Plan, load_of, make_plan, take_items
from epd_serve.bench.run import Run
from epd_serve.bench.runner import Runner
from epd_serve.bench.server import meet
from epd_serve.bench.statistics import percentile
from epd_serve.bench.types import ClientLoad, Item, RunSettings, Workload
from epd_serve.rpc.descriptors import raise_limit

#: Added to the seed for warm-ups: other pictures and texts, so that no cache has those that are measured.
_WARM_UP_SEED = 7_919
_PROGRESS_S = 5.0
_NUM_RECENT = 64


@dataclass(frozen=True, kw_only=True)
class Session:
    """Where runs are made; RunSettings hold what is measured.

    Attributes:
        console: shows the progress.
        api_key: sent to the server, written into no file.
    """

    console: Console
    api_key: str | None = None

    def run(self, path: Path, settings: RunSettings, workload: Workload) -> Run:
        """Make a run and write it into ``path``; an interrupted run has fewer records than planned.

        ``num_requests`` of 0 in the settings stands for the whole workload. Raises ValueError for a server that
        cannot be reached, and for any other fault found before the first request.
        """
        items = take_items(workload, settings.num_requests or None, settings.seed)
        warm_ups = list(islice(workload.items(settings.seed + _WARM_UP_SEED), settings.num_warmups))
        settings.num_requests = len(items)
        plan = make_plan(items, load_of(settings), settings.seed)
        raise_limit()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            run = runner.run(self._run(path, settings, plan, warm_ups))
        run.write()
        return run

    async def _run(self, path: Path, settings: RunSettings, plan: Plan, warm_ups: Sequence[Item]) -> Run:
        async with open_session(settings.base_url, self.api_key) as http:
            server = await meet(http, settings.base_url, settings.model)
            settings.model, settings.topology, settings.emulated = server.model, server.topology, server.emulated
            settings.versions = {"epd-serve": __version__, "python": platform.python_version()}
            if server.version:
                settings.versions["server"] = f"epd-serve {server.version}"
            await self._warm_up(http, settings, warm_ups)
            settings.created_unix_s = time.time()
            runner = Runner(plan, http, settings)
            tester = await self._measure(runner, settings)
        records = sorted(runner.records, key=lambda record: record.index)
        return Run(path=path, settings=settings, records=records, tester=tester)

    async def _measure(self, runner: Runner, settings: RunSettings) -> ClientLoad:
        progress = asyncio.create_task(self._show_progress(runner, settings))
        gc.collect()
        gc.freeze()  # the workload is not looked through again
        began_s, cpu_s = perf_counter(), time.process_time()
        try:
            with self._interruptible(runner):
                await runner.run()
        finally:
            wall_s, cpu_s = perf_counter() - began_s, time.process_time() - cpu_s
            gc.unfreeze()
            progress.cancel()
        lags = sorted(runner.lags_s)
        return ClientLoad(wall_s=wall_s, cpu_s=cpu_s, loop_lag_p99_s=percentile(lags, 99), loop_lag_max_s=lags[-1])

    async def _warm_up(self, http: aiohttp.ClientSession, settings: RunSettings, items: Sequence[Item]) -> None:
        """Send the warm-up requests one after the other, uncounted. Raises ValueError where all of them fail."""
        alone = [replace(item, index=-1 - item.index, conversation=None, turn=0) for item in items]
        runner = Runner(make_plan(alone, ClosedLoop(concurrency=1), 0), http, settings)
        await runner.run()
        failed = [record for record in runner.records if record.failure is not None]
        if failed:
            reason = f"{failed[0].failure}: {failed[0].detail}"
            if len(failed) == len(items):
                raise ValueError(f"every warm-up request failed ({reason}); --warmups 0 goes on without")
            self._say(f"{len(failed)} of {len(items)} warm-up requests failed ({reason})")

    @contextmanager
    def _interruptible(self, runner: Runner) -> Iterator[None]:
        """Stop the run at Ctrl-C: the first waits for requests under way, the second cancels them."""
        if threading.current_thread() is not threading.main_thread():  # only that thread receives signals
            yield
            return
        loop = asyncio.get_running_loop()

        def press() -> None:
            if runner.is_stopping:
                runner.abandon()
            else:
                self._say(f"stopping: {runner.num_active} requests are under way; Ctrl-C again leaves them")
                runner.stop()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, press)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def _show_progress(self, runner: Runner, settings: RunSettings) -> None:
        sent = 0
        while True:
            await asyncio.sleep(_PROGRESS_S)
            recent = runner.records[-_NUM_RECENT:]
            failed = sum(record.failure is not None for record in runner.records)
            name, done = settings.label or settings.workload, f"{len(runner.records)}/{settings.num_requests}"
            rate = f"{(runner.num_sent - sent) / _PROGRESS_S:.1f} req/s"
            ttft, tpot = _median_ms([one.ttft_s for one in recent]), _median_ms([one.tpot_s for one in recent])
            state = f"{runner.num_active} under way, {failed} failed"
            self._say(f"{name}  {done}  {rate}  {state}  TTFT={ttft}  TPOT={tpot}")
            sent = runner.num_sent

    def _say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, highlight=False, markup=False)


def _median_ms(seconds: Sequence[float | None]) -> str:
    known = [one for one in seconds if one is not None]
    return f"{median(known) * 1e3:.1f} ms" if known else "-"
