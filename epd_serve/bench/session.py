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

import uvloop
from rich.console import Console

from epd_serve import __version__
from epd_serve.bench.client import HttpClient
from epd_serve.bench.plan import ClosedLoop, Plan, load_of, make_plan, take_items
from epd_serve.bench.run import Run
from epd_serve.bench.runner import Runner
from epd_serve.bench.server import Server
from epd_serve.bench.statistics import percentile
from epd_serve.bench.types import ClientLoad, Item, RunSettings, Workload
from epd_serve.rpc.descriptors import raise_limit

#: Our gateway shows its last 30 requests. Where more end in the shorter of these, some remain without stages.
_STAGES_INTERVAL_S = (0.25, 1.0)
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
        async with HttpClient(settings.base_url, api_key=self.api_key) as client:
            server = Server(client)
            await server.meet(settings.model)
            settings.model = server.model
            settings.topology, settings.emulated = server.topology, server.emulated
            settings.versions = {"epd-serve": __version__, "python": platform.python_version()}
            if server.version:
                settings.versions["server"] = f"epd-serve {server.version}"
            await self._warm_up(client, server, settings, warm_ups)
            settings.created_unix_s = time.time()
            runner = Runner(plan, client, settings, server.headers)
            tester = await self._measure(runner, server, settings)
        records = sorted(runner.records, key=lambda record: record.index)
        for record in records:
            record.stages = server.stages.get(record.index, [])
        return Run(path=path, settings=settings, records=records, tester=tester)

    async def _measure(self, runner: Runner, server: Server, settings: RunSettings) -> ClientLoad:
        watchers = [asyncio.create_task(self._show_progress(runner, settings))]
        if server.is_ours:
            watchers.append(asyncio.create_task(_watch_stages(server)))
        gc.collect()
        gc.freeze()  # the workload is not looked through again
        began_s, cpu_s = perf_counter(), time.process_time()
        try:
            with self._interruptible(runner):
                await runner.run()
        finally:
            wall_s, cpu_s = perf_counter() - began_s, time.process_time() - cpu_s
            gc.unfreeze()
            for watcher in watchers:
                watcher.cancel()
        if server.is_ours:
            await asyncio.sleep(0.1)  # the gateway records a request after its last byte
            await server.read_stages()
        lags = sorted(runner.lags_s)
        return ClientLoad(wall_s=wall_s, cpu_s=cpu_s, loop_lag_p99_s=percentile(lags, 99), loop_lag_max_s=lags[-1])

    async def _warm_up(
        self, client: HttpClient, server: Server, settings: RunSettings, items: Sequence[Item]
    ) -> None:
        """Send the warm-up requests one after the other, uncounted. Raises ValueError where all of them fail."""
        alone = [replace(item, index=-1 - item.index, conversation=None, turn=0) for item in items]
        runner = Runner(make_plan(alone, ClosedLoop(concurrency=1), 0), client, settings, server.headers)
        await runner.run()
        failed = [record for record in runner.records if record.failure is not None]
        if failed:
            reason = f"{failed[0].failure}: {failed[0].detail}"
            if len(failed) == len(items):
                raise ValueError(f"every warm-up request failed ({reason}); --warmups 0 goes on without")
            self._say(f"{len(failed)} of {len(items)} warm-up requests failed ({reason})")

    @contextmanager
    def _interruptible(self, runner: Runner) -> Iterator[None]:
        """Stop the run at Ctrl-C: the first waits for requests under way, the second leaves them."""
        if threading.current_thread() is not threading.main_thread():  # only that thread receives signals
            yield
            return
        loop = asyncio.get_running_loop()
        presses = 0

        def press() -> None:
            nonlocal presses
            presses += 1
            if presses == 1:
                self._say(f"stopping: {len(runner.active)} requests are under way; Ctrl-C again leaves them")
                runner.stop()
            else:
                runner.abandon()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, press)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def _show_progress(self, runner: Runner, settings: RunSettings) -> None:
        began_s, sent = perf_counter(), 0
        while True:
            await asyncio.sleep(_PROGRESS_S)
            recent = runner.records[-_NUM_RECENT:]
            failed = sum(record.failure is not None for record in runner.records)
            line = "  ".join(
                (
                    settings.label or settings.workload,
                    f"{len(runner.records)}/{settings.num_requests}",
                    f"{(runner.num_sent - sent) / _PROGRESS_S:.1f} req/s",
                    f"POST={runner.num_sent} FAIL={failed} FINISH={len(runner.records)}",
                    f"TTFT={_median_ms([one.ttft_s for one in recent])}",
                    f"TPOT={_median_ms([one.tpot_s for one in recent])}",
                    f"{perf_counter() - began_s:.0f} s",
                )
            )
            sent = runner.num_sent
            self._say(line)

    def _say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, highlight=False, markup=False)


async def _watch_stages(server: Server) -> None:
    least_s, interval_s = _STAGES_INTERVAL_S
    while True:
        await asyncio.sleep(interval_s)
        if await server.read_stages():
            interval_s = max(least_s, interval_s / 2)


def _median_ms(seconds: Sequence[float | None]) -> str:
    known = [one for one in seconds if one is not None]
    return f"{median(known) * 1e3:.1f} ms" if known else "-"
