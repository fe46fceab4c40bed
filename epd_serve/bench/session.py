"""One run from its begin to its end: meet the server, warm up, send, watch, sum up."""

from __future__ import annotations

import asyncio
import gc
import platform
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter

import uvloop
from rich.console import Console
from rich.live import Live
from rich.text import Text

from epd_serve import __version__
from epd_serve.bench.connection import Connections, Target
from epd_serve.bench.plan import Plan, digest, load_of, make_plan, parse_load, take_items
from epd_serve.bench.run_directory import RunDirectory, RunWriter, Stages
from epd_serve.bench.runner import Counters, Runner
from epd_serve.bench.server import LocalServer, Server
from epd_serve.bench.statistics import percentile
from epd_serve.bench.summary import summarise
from epd_serve.bench.types import Item, Record, RunSettings, Sample, Segment, StageSpan, Summary, Workload
from epd_serve.rpc.descriptors import raise_limit

_SHOW_INTERVAL_S = 1.0
#: Between two reads of the server's metrics.
_METRICS_INTERVAL_S = 2.0
#: Our gateway tells of its last 30 requests. Where more end in the shorter of these, some remain without stages.
_STAGES_INTERVAL_S = (0.25, 1.0)
#: Seeds of warm-ups: other pictures and texts than those that are measured, so that no cache has them.
_WARM_UP_SEED = 7_919


@dataclass(frozen=True, kw_only=True)
class Session:
    """The environment in which runs are made; RunSettings hold what is measured.

    Attributes:
        console: where the live line is drawn.
        api_key: sent to the server, written into no file.
    """

    console: Console
    api_key: str | None = None

    def begin(self, path: Path, settings: RunSettings, workload: Workload) -> tuple[RunDirectory, Summary | None]:
        """Make a new run in ``path``. Summary is None where nothing had ended when the run was interrupted.

        ``num_requests`` of 0 in the settings stands for the whole workload. Raises ValueError for a server that
        cannot be reached and for any other fault found before the first request.
        """
        count = settings.num_requests or None
        items = take_items(workload, count, settings.seed)
        settings.num_requests = len(items)
        settings.workload_digest = digest(items)
        settings.created_unix_s = time.time()
        plan = make_plan(items, load_of(settings), settings.seed)
        warm_ups = list(islice(workload.items(settings.seed + _WARM_UP_SEED), settings.num_warmups))

        def make(server: Server) -> RunDirectory:
            settings.model = server.model
            settings.topology, settings.emulated = server.topology, server.emulated
            settings.versions = {"epd-serve": __version__, "python": platform.python_version()}
            if server.version:
                settings.versions["server"] = f"epd-serve {server.version}"
            return RunDirectory.create(path, settings, plan.schedule())

        return self._run(settings, make, plan, warm_ups)

    def resume(self, run: RunDirectory, workload: Workload) -> tuple[RunDirectory, Summary | None]:
        """Continue a run; requests that have a record are not sent again.

        Raises ValueError where the workload has changed since the run began.
        """
        settings = run.settings
        items = take_items(workload, settings.num_requests, settings.seed)
        if digest(items) != settings.workload_digest:
            raise ValueError(f"{run.path}: workload {settings.workload} is not what it was when the run began")
        plan = make_plan(items, load_of(settings), settings.seed)
        return self._run(settings, lambda _: run, plan, [])

    def _run(
        self,
        settings: RunSettings,
        make: Callable[[Server], RunDirectory],
        plan: Plan,
        warm_ups: Sequence[Item],
    ) -> tuple[RunDirectory, Summary | None]:
        raise_limit()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            run = runner.run(self._work(settings, make, plan, warm_ups))
        records = run.records()
        if not records:
            return run, None
        return run, summarise(run.settings, records, run.schedule(), run.segments())

    async def _work(
        self,
        settings: RunSettings,
        make: Callable[[Server], RunDirectory],
        plan: Plan,
        warm_ups: Sequence[Item],
    ) -> RunDirectory:
        connections = Connections(Target(settings.base_url), timeout_s=settings.timeout_s)
        server = Server(connections, api_key=self.api_key)
        try:
            await server.meet(settings.model or None)
            run = make(server)
            with closing(RunWriter(run)) as writer:
                done = {record.index: record for record in run.records()}
                segment = Segment(segment=len(run.segments()), started_unix_s=time.time(), plan_offset_s=0.0)
                title = settings.label or settings.workload
                progress = Progress(self.console, title, settings.num_requests, len(done))
                with progress.live or nullcontext():
                    await _warm_up(connections, server, settings, warm_ups, progress)
                    await self._measure(connections, server, settings, plan, writer, done, segment, progress)
        finally:
            await connections.close()
        return run

    async def _measure(
        self,
        connections: Connections,
        server: Server,
        settings: RunSettings,
        plan: Plan,
        writer: RunWriter,
        done: dict[int, Record],
        segment: Segment,
        progress: Progress,
    ) -> None:
        def on_record(record: Record) -> None:
            record.request_id = server.request_id(record.index)
            writer.write(record)
            progress.ended(record)

        runner = Runner(
            plan,
            connections,
            settings,
            headers=server.headers,
            on_record=on_record,
            done=done,
            segment=segment.segment,
        )
        segment.plan_offset_s = runner.plan_offset_s
        writer.write(segment)
        local = LocalServer(connections.target.address, connections.target.port)
        watcher = _Watcher(server, local, writer, settings.num_requests)
        await watcher.sample(runner.plan_offset_s, "before")
        gc.collect()
        gc.freeze()  # the workload is not looked through again
        began_s, cpu_s = time.perf_counter(), time.process_time()
        tasks = [
            asyncio.create_task(_show(runner, progress)),
            asyncio.create_task(watcher.watch_metrics(runner)),
            asyncio.create_task(watcher.watch_stages()),
        ]
        try:
            with _interruptible(runner, progress):
                is_complete = await runner.run()
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            gc.unfreeze()
        for result in results:
            if isinstance(result, Exception):
                raise result
        segment.wall_s, segment.cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
        segment.num_requests = runner.counters.finished
        lags = sorted(runner.lags_s) or [0.0]
        segment.loop_lag_p99_s, segment.loop_lag_max_s = percentile(lags, 99), lags[-1]
        await watcher.finish(runner.now())
        segment.ended = "complete" if is_complete else "interrupted"
        writer.write(segment)


class _Watcher:
    """Looks at the server while it works."""

    def __init__(self, server: Server, local: LocalServer, writer: RunWriter, num_requests: int) -> None:
        self._server = server
        self._num_requests = num_requests
        self._local = local
        self._writer = writer

    async def sample(self, at_s: float, phase: str) -> None:
        metrics, devices = await self._server.metrics(), await self._local.sample()
        if metrics or devices:
            self._writer.write(Sample(at_s=round(at_s, 3), phase=phase, metrics=metrics, devices=devices))

    async def watch_metrics(self, runner: Runner) -> None:
        while True:
            await asyncio.sleep(_METRICS_INTERVAL_S)
            await self.sample(runner.now(), "during")

    async def watch_stages(self) -> None:
        least_s, interval_s = _STAGES_INTERVAL_S
        while self._server.is_ours:
            await asyncio.sleep(interval_s)
            if await self._server.new_stages(self._stages):
                interval_s = max(least_s, interval_s / 2)

    async def finish(self, at_s: float) -> None:
        if self._server.is_ours:
            await asyncio.sleep(0.1)  # the gateway ends its books behind its last byte
            await self._server.new_stages(self._stages)
        await self.sample(at_s, "after")

    def _stages(self, index: int, stages: list[StageSpan]) -> None:
        if index < self._num_requests:  # others use the server too
            self._writer.write(Stages(index, stages))


async def _show(runner: Runner, progress: Progress) -> None:
    while True:
        await asyncio.sleep(_SHOW_INTERVAL_S)
        progress.show(runner.counters, sum(bool(one.answer.token_times_s) for one in runner.active))


async def _warm_up(
    connections: Connections, server: Server, settings: RunSettings, items: Sequence[Item], progress: Progress
) -> None:
    """Send the warm-up requests one after the other, uncounted. Raises ValueError where all of them fail."""
    failures: list[Record] = []
    alone = [replace(item, conversation=None, turn=0) for item in items]
    plan = make_plan(alone, parse_load("closed:1"), 0)
    runner = Runner(
        plan,
        connections,
        settings,
        headers=lambda index: server.headers(-1 - index),
        on_record=lambda record: failures.append(record) if record.failure is not None else None,
    )
    if items and not await runner.run():
        raise ValueError("the warm-up was interrupted")
    if failures:
        first = f"{failures[0].failure}: {failures[0].detail}"
        if len(failures) == len(items):
            raise ValueError(f"every warm-up request failed ({first}); --warmups 0 goes on without")
        progress.note(f"{len(failures)} of {len(items)} warm-up requests failed ({first})")


@contextmanager
def _interruptible(runner: Runner, progress: Progress) -> Iterator[None]:
    """Let Ctrl-C stop the run: the first waits for requests on their way, the second leaves them."""
    if threading.current_thread() is not threading.main_thread():  # signals are for that one
        yield
        return
    loop = asyncio.get_running_loop()
    presses = 0

    def press() -> None:
        nonlocal presses
        presses += 1
        if presses == 1:
            progress.note(f"stopping: {len(runner.active)} requests are on their way; Ctrl-C again leaves them")
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


_NUM_RECENT = 64
#: Between two lines where the output is no terminal.
_LOG_INTERVAL_S = 10.0


class Progress:
    """Shows one run. Drawing takes a millisecond or two, so it is done once a second.

    Attributes:
        live: the live line, which is to be entered; None where the output is no terminal.
    """

    def __init__(self, console: Console, title: str, num_requests: int, num_done: int = 0) -> None:
        self._console = console
        self._title = title
        self._num_requests = num_requests
        self._num_done = num_done
        self.live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._ttft_s: deque[float] = deque(maxlen=_NUM_RECENT)
        self._tpot_s: deque[float] = deque(maxlen=_NUM_RECENT)
        self._began_s = perf_counter()
        self._logged_s = self._began_s
        self._last = (self._began_s, 0)

    def ended(self, record: Record) -> None:
        if record.ttft_s is not None and record.succeeded:
            self._ttft_s.append(record.ttft_s)
            if record.tpot_s is not None:
                self._tpot_s.append(record.tpot_s)

    def show(self, counters: Counters, num_receiving: int) -> None:
        """Draw the live line. ``num_receiving``: requests that have their first token and are not finished."""
        now_s = perf_counter()
        if self.live is None and now_s - self._logged_s < _LOG_INTERVAL_S:
            return
        line = self._line(counters, num_receiving, now_s)
        if self.live is None:
            self._logged_s = now_s
            self._console.print(line, soft_wrap=True, highlight=False)
        else:
            self.live.update(Text(line), refresh=True)

    def note(self, text: str) -> None:
        """Print a line that stays above the live line."""
        self._console.print(text, highlight=False, markup=False)

    def _line(self, counters: Counters, num_receiving: int, now_s: float) -> str:
        since_s, before = self._last
        rate = (counters.sent - before) / max(now_s - since_s, 1e-9)
        self._last = now_s, counters.sent
        finished = self._num_done + counters.finished
        parts = [
            self._title,
            f"{finished}/{self._num_requests}",
            f"{rate:.1f} req/s",
            f"POST={counters.sent} RECV={counters.received + num_receiving} FAIL={counters.failed} "
            f"FINISH={counters.finished}",
            f"TTFT={_ms(self._ttft_s)} TPOT={_ms(self._tpot_s)}",
            f"{now_s - self._began_s:.0f} s",
        ]
        return "  ".join(parts)


def _ms(seconds: deque[float]) -> str:
    return f"{median(seconds) * 1e3:.1f} ms" if seconds else "-"
