"""Measure a server: one run, a series of rates, or a search for goodput."""

from __future__ import annotations

import asyncio
import gc
import math
import platform
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from time import perf_counter

import aiohttp
import msgspec
import uvloop
from rich.console import Console

from epd_serve import __version__
from epd_serve.bench.client import describe_server, open_session
from epd_serve.bench.plan import take_items
from epd_serve.bench.result_files import write_result_files
from epd_serve.bench.run import Run
from epd_serve.bench.runner import Runner
from epd_serve.bench.summary import percentile
from epd_serve.bench.types import ClientLoad, Item, RunSettings, Workload
from epd_serve.bench.workloads import load_workload
from epd_serve.rpc.sockets import raise_limit

#: Added to the seed for warm-ups: their pictures and texts must not be in a cache when the run begins.
_WARM_UP_SEED = 7_919
#: Added to the seed for each further rate, so that each sends other pictures and texts.
_RATE_SEED = 1_000_003
_PROGRESS_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Session:
    """Makes runs; :class:`RunSettings` say what to measure.

    Attributes:
        console: shows progress.
        api_key: sent to the server, never written to a file.
    """

    console: Console
    api_key: str | None = None

    def measure_rates(self, path: Path, settings: RunSettings, rates: Iterable[float | None]) -> Iterator[Run]:
        """Yield a run for each rate, each in a folder of ``path``; None is a load without a rate.

        An interrupted run is the last.
        """
        for number, rate in enumerate(rates):
            wanted = msgspec.structs.replace(settings, rate=rate, seed=settings.seed + number * _RATE_SEED)
            if wanted.duration_s is not None and rate is not None:
                wanted.num_requests = max(1, math.ceil(rate * wanted.duration_s))
            folder = path / ("run" if rate is None else f"rate-{rate:.12g}")
            run = self.run(folder, wanted, load_workload(settings.workload))
            if not run.records:
                return
            write_result_files(run)
            total = run.total
            failed = f"{total.num_failed} of {total.num_requests} failed"
            self._say(f"  {run.load_text}: {total.attainment.value:.1%} good, {failed}")
            yield run
            if not run.is_complete:
                return

    def find_goodput(self, path: Path, settings: RunSettings, search: GoodputSearch, target: float) -> list[Run]:
        """Measure rates until the highest with an attainment of ``target`` is known."""
        runs = []
        for run in self.measure_rates(path, settings, iter(search.next_rate, None)):
            runs.append(run)
            if run.is_complete:
                assert run.settings.rate is not None
                search.add_result(run.settings.rate, attained=run.total.attainment.value >= target)
        return runs

    def run(self, path: Path, settings: RunSettings, workload: Workload) -> Run:
        """Make one run and write it to ``path``; an interrupted run has fewer records than planned.

        ``num_requests`` 0 stands for the whole workload. Raises ValueError for any fault found before the first
        request, such as an unreachable server.
        """
        items = take_items(workload, settings.num_requests or None, settings.seed)
        warm_ups = list(islice(workload.items(settings.seed + _WARM_UP_SEED), settings.num_warmups))
        settings.num_requests = len(items)
        raise_limit()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            run = runner.run(self._run(path, settings, items, warm_ups))
        run.write()
        return run

    async def _run(self, path: Path, settings: RunSettings, items: list[Item], warm_ups: list[Item]) -> Run:
        async with open_session(settings.base_url, self.api_key) as http:
            runner = Runner(items, http, settings)
            settings.versions = {"epd-serve": __version__, "python": platform.python_version()}
            await describe_server(http, settings)
            await self._warm_up(http, settings, warm_ups)
            settings.created_unix_s = time.time()
            tester = await self._measure(runner, settings)
        records = sorted(runner.records, key=lambda record: record.index)
        return Run(path=path, settings=settings, records=records, tester=tester)

    async def _warm_up(self, http: aiohttp.ClientSession, settings: RunSettings, items: list[Item]) -> None:
        """Send uncounted requests one by one. Raises ValueError if all fail."""
        alone = [replace(item, index=-1 - item.index, conversation=None, turn=0) for item in items]
        runner = Runner(alone, http, msgspec.structs.replace(settings, arrivals="closed:1", rate=None))
        await runner.run()
        failed = [record for record in runner.records if record.failure is not None]
        if failed:
            reason = f"{failed[0].failure}: {failed[0].detail}"
            if len(failed) == len(items):
                raise ValueError(f"all warm-up requests failed ({reason}); --warmups 0 skips them")
            self._say(f"{len(failed)} of {len(items)} warm-up requests failed ({reason})")

    async def _measure(self, runner: Runner, settings: RunSettings) -> ClientLoad:
        """Send the run's requests. The first Ctrl-C waits for open ones, the second cancels them."""
        loop = asyncio.get_running_loop()
        progress = loop.create_task(self._show_progress(runner, settings))
        is_main = threading.current_thread() is threading.main_thread()  # only that thread receives signals
        signals = (signal.SIGINT, signal.SIGTERM) if is_main else ()
        for number in signals:
            loop.add_signal_handler(number, self._interrupt, runner)
        gc.collect()
        gc.freeze()  # later collections skip the workload
        began_s, cpu_s = perf_counter(), time.process_time()
        try:
            await runner.run()
        finally:
            wall_s, cpu_s = perf_counter() - began_s, time.process_time() - cpu_s
            gc.unfreeze()
            progress.cancel()
            for number in signals:
                loop.remove_signal_handler(number)
        lags = sorted(runner.lags_s)
        return ClientLoad(wall_s=wall_s, cpu_s=cpu_s, loop_lag_p99_s=percentile(lags, 99), loop_lag_max_s=lags[-1])

    def _interrupt(self, runner: Runner) -> None:
        if runner.is_stopping:
            runner.abandon()
        else:
            self._say(f"stopping: {runner.num_active} requests are open; press Ctrl-C again to cancel them")
            runner.stop()

    async def _show_progress(self, runner: Runner, settings: RunSettings) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_S)
            name, done = settings.label or settings.workload, f"{len(runner.records)}/{settings.num_requests}"
            failed = sum(record.failure is not None for record in runner.records)
            self._say(f"{name}  {done}  {runner.num_active} open, {failed} failed")

    def _say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, highlight=False, markup=False)


class GoodputSearch:
    """Finds the highest rate that attains the SLO by doubling and bisection; each rate is tried once.

    If attainment falls as the rate grows, ``attained`` is within ``precision`` (relative) of the true limit, as
    far as that lies between ``lowest`` and ``highest``.

    Attributes:
        attained, missed: the highest rate known to attain, the lowest known to miss; None before.
    """

    def __init__(self, *, start: float, lowest: float, highest: float, precision: float = 0.05) -> None:
        """Raises ValueError for an empty range."""
        if not 0 < lowest <= start <= highest:
            raise ValueError(
                f"a search needs 0 < lowest <= start <= highest, not {lowest:g}, {start:g}, {highest:g}"
            )
        self._start, self._lowest, self._highest, self._precision = start, lowest, highest, precision
        self.attained: float | None = None
        self.missed: float | None = None

    def next_rate(self) -> float | None:
        """Return the next rate to try; None ends the search."""
        if self.attained is None:
            if self.missed is None:
                return self._start
            return None if self.missed <= self._lowest else max(self.missed / 2, self._lowest)
        if self.missed is None:
            return None if self.attained >= self._highest else min(2 * self.attained, self._highest)
        if self.missed <= self.attained * (1 + self._precision):
            return None
        return (self.attained + self.missed) / 2

    def add_result(self, rate: float, *, attained: bool) -> None:
        """Record a result. One that contradicts an earlier result is ignored, so that the bounds never cross."""
        is_above = self.attained is None or rate > self.attained
        is_below = self.missed is None or rate < self.missed
        if is_above and is_below:
            if attained:
                self.attained = rate
            else:
                self.missed = rate


def parse_rates(text: str) -> list[float]:
    """Read ``FROM:TO:STEP`` (both ends included) or an ascending list such as ``1,2,4``. Raises ValueError."""
    try:
        if ":" in text:
            begin, end, step = (float(part) for part in text.split(":"))
            if not (begin > 0 and step > 0 and begin <= end < math.inf and step < math.inf):
                raise ValueError
            count = int((end - begin) / step + 1e-9) + 1
            return [round(begin + index * step, 9) for index in range(count)]
        rates = [float(part) for part in text.split(",")]
        if not all(0 < rate < math.inf for rate in rates) or rates != sorted(set(rates)):
            raise ValueError
    except ValueError:
        example = "write FROM:TO:STEP as in 1:12:1, or a list as in 1,2,4"
        raise ValueError(f"cannot read rates {text!r}; {example}") from None
    return rates
