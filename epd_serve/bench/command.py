"""The work of ``epd-serve bench``: from its options to runs, tables and files."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from epd_serve.bench.arrivals import ClosedLoop, Trace, parse_load
from epd_serve.bench.compare import (
    CompareFile,
    Comparison,
    read_comparison,
    run_comparison,
    show_comparison,
)
from epd_serve.bench.deployed import read_candidates
from epd_serve.bench.outputs import Outputs, missed, read_runs, write_run
from epd_serve.bench.progress import Progress
from epd_serve.bench.run_directory import RunDirectory, new_directory
from epd_serve.bench.sampled import sampled
from epd_serve.bench.search import parse_rates
from epd_serve.bench.session import Session
from epd_serve.bench.sweep import Outcome, SearchRange, Sweep, is_complete, read_sweep
from epd_serve.bench.tables import show_summary, show_sweep
from epd_serve.bench.types import SLO, RunSettings, Workload
from epd_serve.bench.workloads import load_workload

#: A search goes no lower than this part of its first rate.
_LOWEST = 1 / 64
_FILE_WIDTH = 120


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The options of ``epd-serve bench``, as typed."""

    base_url: str
    workload: str
    model: str = ""
    num_requests: int = 0
    duration_s: float | None = None
    arrivals: str = "poisson"
    rate: float | None = None
    rates: str | None = None
    find_goodput: bool = False
    attainment: float = 0.9
    precision: float = 0.05
    max_rate: float = 1000.0
    max_concurrency: int | None = None
    slo: SLO = field(default_factory=SLO)
    num_devices: int = 1
    num_warmups: int = 2
    timeout_s: float = 600.0
    seed: int = 0
    time_scale: float = 1.0
    fields: dict[str, Any] = field(default_factory=dict)
    label: str = ""
    argv: list[str] = field(default_factory=list)

    def settings(self, rate: float | None) -> RunSettings:
        """The settings of a run at this rate.

        Raises ValueError for arrivals that are invalid or do not go with it.
        """
        load = parse_load(self.arrivals, rate=rate, time_scale=self.time_scale)
        if self.max_concurrency is not None and isinstance(load, ClosedLoop):
            raise ValueError(f"arrivals {self.arrivals} have their own concurrency; leave --max-concurrency out")
        if self.time_scale != 1.0 and not isinstance(load, Trace):
            raise ValueError("--time-scale is for --arrivals trace")
        num_requests = self.num_requests
        if self.duration_s is not None:
            if isinstance(load, ClosedLoop | Trace):
                raise ValueError(f"arrivals {self.arrivals} have no rate; give --num-requests, not --duration")
            num_requests = max(1, math.ceil(load.rate * self.duration_s))
        return RunSettings(
            base_url=self.base_url.rstrip("/").removesuffix("/v1"),
            model=self.model,
            workload=self.workload,
            num_requests=num_requests,
            seed=self.seed,
            arrivals=self.arrivals,
            rate=rate,
            time_scale=self.time_scale,
            max_concurrency=self.max_concurrency,
            slo=self.slo,
            num_devices=self.num_devices,
            num_warmups=self.num_warmups,
            timeout_s=self.timeout_s,
            fields=self.fields,
            label=self.label,
            argv=self.argv,
        )


def run_bench(
    wanted: Wanted,
    work_dir: Path,
    *,
    api_key: str | None,
    as_json: bool,
    outputs: Outputs,
    compare: Sequence[Path] = (),
) -> int:
    """A run, a sweep, a search or a comparison of deployment files.

    Returns the exit code: 0, 130 where it was interrupted, or that of ``outputs``.
    """
    rates = None if wanted.rates is None else parse_rates(wanted.rates)
    if rates is not None and (wanted.rate is not None or wanted.find_goodput):
        raise ValueError("--rates names all rates; leave --rate and --find-goodput out")
    workload = load_workload(wanted.workload)  # its faults are told before anything is made
    console = _console(as_json=as_json)
    session = _session(console, api_key)
    if compare:
        return _compare(console, session, wanted, rates, work_dir, compare, outputs)
    if rates is None and not wanted.find_goodput:
        settings = wanted.settings(_rate(wanted))
        path = new_directory(work_dir)
        try:
            outcome = session.begin(path, settings, workload)
        finally:
            with suppress(OSError):  # it holds a run, unless none could begin
                path.rmdir()
        return _end_run(console, outcome, outputs, as_json=as_json)
    first = rates[0] if rates else 1.0 if wanted.rate is None else wanted.rate
    settings = wanted.settings(first)
    sweep = _sweep(console, session, new_directory(work_dir), settings, wanted.duration_s, wanted.attainment)
    if rates is not None:
        return _end_sweep(console, sweep, sweep.over(rates), len(rates), outputs, as_json=as_json)
    lowest, highest = first * _LOWEST, max(first, wanted.max_rate)
    searched = SearchRange(start=first, lowest=lowest, highest=highest, precision=wanted.precision)
    return _end_sweep(console, sweep, sweep.find(searched), None, outputs, as_json=as_json)


def resume_bench(path: Path, *, api_key: str | None, as_json: bool, outputs: Outputs) -> int:
    """Go on with a run, a sweep or a comparison. Returns the exit code."""
    console = _console(as_json=as_json)
    session = _session(console, api_key)
    if (path / "compare.json").exists():
        compared = read_comparison(path)
        compared.failed = {}
        candidates = read_candidates([Path(file) for file in compared.files])
        return run_comparison(console, _comparison(session, path, compared), candidates, outputs)
    if (path / "sweep.json").exists():
        file = read_sweep(path)
        outputs = replace(outputs, attainment=file.target)
        sweep = _sweep(console, session, path, file.settings, file.duration_s, file.target)
        if file.search is not None:
            return _end_sweep(console, sweep, sweep.find(file.search), None, outputs, as_json=as_json)
        return _end_sweep(console, sweep, sweep.over(file.rates), len(file.rates), outputs, as_json=as_json)
    run = RunDirectory.open(path)
    if is_complete(run):
        raise ValueError(f"{path} is complete; there is nothing to resume")
    outcome = session.resume(run, load_workload(run.settings.workload))
    return _end_run(console, outcome, outputs, as_json=as_json)


def redraw_bench(
    directories: Sequence[Path], ttft_ms: float | None, tpot_ms: float | None, *, outputs: Outputs
) -> int:
    """Report the runs in several directories again, all in one report, which goes into the first of them.

    Limits that are given stand for those of the runs. Returns the exit code.
    """
    console = _console(as_json=False)
    runs = [run for path in directories for run in read_runs(path, ttft_ms, tpot_ms)]
    show_comparison(console, runs, outputs.attainment)
    outputs.write(console, directories[0], runs)
    return outputs.exit_code(console, runs)


def _compare(
    console: Console,
    session: Session,
    wanted: Wanted,
    rates: list[float] | None,
    work_dir: Path,
    files: Sequence[Path],
    outputs: Outputs,
) -> int:
    if wanted.find_goodput:
        raise ValueError("--compare goes with --rate or --rates, not with --find-goodput")
    candidates = read_candidates(files)
    rate = _rate(wanted)
    if rates is None and rate is not None:
        rates = [rate]
    compared = CompareFile(
        settings=wanted.settings(rates[0] if rates else None),
        files=[str(file.resolve()) for file in files],
        rates=rates or [],
        duration_s=wanted.duration_s,
    )
    return run_comparison(console, _comparison(session, new_directory(work_dir), compared), candidates, outputs)


def _comparison(session: Session, path: Path, file: CompareFile) -> Comparison:
    return Comparison(
        session=session, path=path, file=file, load_workload=lambda: load_workload(file.settings.workload)
    )


def _rate(wanted: Wanted) -> float | None:
    """The rate, 1 by default; a trace has its own times, a closed loop none."""
    kind = wanted.arrivals.partition(":")[0]
    if wanted.rate is None and kind in ("poisson", "constant", "gamma"):
        return 1.0
    return wanted.rate


def _console(*, as_json: bool) -> Console:
    """A console that is wide enough for all figures; a file or a pipe has no width of its own."""
    console = Console(stderr=as_json)
    return console if console.is_terminal else Console(stderr=as_json, width=max(_FILE_WIDTH, console.width))


def _session(console: Console, api_key: str | None) -> Session:
    return Session(progress=lambda title, number, done: Progress(console, title, number, done), api_key=api_key)


def _sweep(
    console: Console,
    session: Session,
    path: Path,
    settings: RunSettings,
    duration_s: float | None,
    target: float,
) -> Sweep:
    def load() -> Workload:
        return load_workload(settings.workload)

    def ended(outcome: Outcome) -> None:
        run, summary = outcome
        total = summary.total
        console.print(
            f"{run.settings.rate:g} req/s: {total.attainment.value:.1%} attained, {total.num_failed} of "
            f"{total.num_requests} failed",
            highlight=False,
        )

    return Sweep(
        session=session,
        path=path,
        settings=settings,
        load_workload=load,
        duration_s=duration_s,
        target=target,
        ended=ended,
    )


def _end_run(console: Console, outcome: tuple[RunDirectory, Any], outputs: Outputs, *, as_json: bool) -> int:
    run, summary = outcome
    if summary is None:
        console.print(f"interrupted before any request ended; go on with --resume {run.path}", highlight=False)
        return 130
    show_summary(console, run.settings, summary, sampled(run.samples()))
    _print_json(as_json, [(run, summary)])
    runs = [write_run(run, summary)]
    outputs.write(console, run.path, runs)
    console.print(f"in {run.path}", highlight=False)
    if not is_complete(run):
        console.print(f"interrupted; go on with --resume {run.path}", highlight=False)
        return 130
    return outputs.exit_code(console, runs)


def _end_sweep(
    console: Console,
    sweep: Sweep,
    outcomes: Sequence[Outcome],
    expected: int | None,
    outputs: Outputs,
    *,
    as_json: bool,
) -> int:
    runs = [write_run(run, summary) for run, summary in outcomes]
    if outcomes:
        by_rate = sorted(outcomes, key=lambda outcome: outcome[0].settings.rate or 0.0)
        show_sweep(console, [(run.settings, summary) for run, summary in by_rate])
        _print_json(as_json, by_rate)
        outputs.write(console, sweep.path, runs)
    if not outcomes or not is_complete(outcomes[-1][0]) or (expected is not None and len(outcomes) < expected):
        console.print(f"interrupted; go on with --resume {sweep.path}", highlight=False)
        return 130
    if expected is None:
        _say_goodput(console, sweep)
        # a search tries rates that are too high: the best that it found is what counts
        good = [run for run in runs if not missed(run, outputs.attainment)]
        runs = good[-1:] or runs
    console.print(f"in {sweep.path}", highlight=False)
    return outputs.exit_code(console, runs)


def _say_goodput(console: Console, sweep: Sweep) -> None:
    file = read_sweep(sweep.path)
    wanted = f"{file.target:.0%} attainment"
    devices = file.settings.num_devices
    if file.goodput is None:
        text = f"no rate that was tried reaches {wanted}"
    else:
        bound = "" if file.is_bounded else " or more: no rate was found that misses it"
        text = f"goodput {file.goodput:.3g} req/s, {file.goodput / devices:.3g} per device, at {wanted}{bound}"
    console.print(text, style="bold", highlight=False)


def _print_json(as_json: bool, outcomes: Sequence[Outcome]) -> None:
    if as_json:
        found = [
            {
                "directory": str(run.path),
                "settings": run.settings,
                "summary": summary,
                "server": sampled(run.samples()),
                "segments": run.segments(),
            }
            for run, summary in outcomes
        ]
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n")
