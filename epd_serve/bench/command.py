"""The work of ``epd-serve bench``: from its options to runs, tables on the terminal, and files."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from epd_serve.bench.compare import (
    CompareFile,
    Comparison,
    figures_table,
    run_comparison,
    show_comparison,
    show_verdicts,
)
from epd_serve.bench.deployed import read_candidates
from epd_serve.bench.outputs import Outputs, missed, read_runs, write_run
from epd_serve.bench.plan import ClosedLoop, Trace, load_of
from epd_serve.bench.run_directory import RunDirectory, new_directory, read_json
from epd_serve.bench.server import Sampled, sampled
from epd_serve.bench.session import Session
from epd_serve.bench.sweep import Outcome, SearchRange, Sweep, is_complete, parse_rates, read_sweep
from epd_serve.bench.types import Distribution, RunSettings, Share, Summary, WindowSummary
from epd_serve.bench.workloads import load_workload

#: A search goes no lower than this part of its first rate.
_LOWEST = 1 / 64
_FILE_WIDTH = 120


def run_bench(
    settings: RunSettings,
    work_dir: Path,
    *,
    rates: str | None = None,
    goodput: tuple[float, float] | None = None,
    duration_s: float | None = None,
    compare: Sequence[Path] = (),
    api_key: str | None,
    as_json: bool,
    outputs: Outputs,
) -> int:
    """A run, a sweep, a search or a comparison of deployment files.

    Args:
        rates: as typed, of a sweep.
        goodput: of a search, its relative precision and its highest rate.
        duration_s: seconds of requests at each rate, in place of the settings' number.

    Returns the exit code: 0, 130 where it was interrupted, or that of ``outputs``.
    """
    chosen = None if rates is None else parse_rates(rates)
    if chosen is not None and (settings.rate is not None or goodput):
        raise ValueError("--rates names all rates; leave --rate and --find-goodput out")
    if compare and goodput:
        raise ValueError("--compare goes with --rate or --rates, not with --find-goodput")
    workload = load_workload(settings.workload)  # its faults are told before anything is made
    if settings.rate is None and (
        goodput or settings.arrivals.partition(":")[0] in ("poisson", "constant", "gamma")
    ):
        settings.rate = 1.0
    if chosen:
        settings.rate = chosen[0]
    _check_load(settings, duration_s)
    console = _console(as_json=as_json)
    session = Session(console=console, api_key=api_key)
    if compare:
        candidates = read_candidates(compare)
        compared = CompareFile(
            settings=settings,
            files=[str(file.resolve()) for file in compare],
            rates=chosen or ([] if settings.rate is None else [settings.rate]),
            duration_s=duration_s,
        )
        comparison = Comparison(session=session, path=new_directory(work_dir), file=compared)
        return run_comparison(comparison, candidates, outputs)
    if chosen is None and goodput is None:
        path = new_directory(work_dir)
        try:
            outcome = session.begin(path, settings, workload)
        finally:
            with suppress(OSError):  # it holds a run, unless none could begin
                path.rmdir()
        return _end_run(console, outcome, outputs, as_json=as_json)
    path, target = new_directory(work_dir), outputs.attainment
    sweep = Sweep(session=session, path=path, settings=settings, duration_s=duration_s, target=target)
    if goodput is None:
        return _end_sweep(console, sweep, sweep.over(chosen or []), outputs, as_json=as_json)
    assert settings.rate is not None
    lowest, highest = settings.rate * _LOWEST, max(settings.rate, goodput[1])
    searched = SearchRange(start=settings.rate, lowest=lowest, highest=highest, precision=goodput[0])
    return _end_sweep(console, sweep, sweep.find(searched), outputs, as_json=as_json, is_search=True)


def resume_bench(path: Path, *, api_key: str | None, as_json: bool, outputs: Outputs) -> int:
    """Go on with a run, a sweep or a comparison. Returns the exit code."""
    console = _console(as_json=as_json)
    session = Session(console=console, api_key=api_key)
    if (path / "compare.json").exists():
        compared = read_json(path / "compare.json", CompareFile)
        compared.failed = {}
        candidates = read_candidates([Path(file) for file in compared.files])
        return run_comparison(Comparison(session=session, path=path, file=compared), candidates, outputs)
    if (path / "sweep.json").exists():
        file = read_sweep(path)
        outputs = replace(outputs, attainment=file.target)
        sweep = Sweep(
            session=session, path=path, settings=file.settings, duration_s=file.duration_s, target=file.target
        )
        if file.search is not None:
            return _end_sweep(console, sweep, sweep.find(file.search), outputs, as_json=as_json, is_search=True)
        return _end_sweep(console, sweep, sweep.over(file.rates), outputs, as_json=as_json)
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


def _check_load(settings: RunSettings, duration_s: float | None) -> None:
    """Set the number of requests from a duration.

    Raises ValueError for arrivals that are invalid or do not go with the other settings.
    """
    load = load_of(settings)
    if settings.max_concurrency is not None and isinstance(load, ClosedLoop):
        raise ValueError(f"arrivals {settings.arrivals} have their own concurrency; leave --max-concurrency out")
    if settings.time_scale != 1.0 and not isinstance(load, Trace):
        raise ValueError("--time-scale is for --arrivals trace")
    if duration_s is not None:
        if isinstance(load, ClosedLoop | Trace):
            raise ValueError(f"arrivals {settings.arrivals} have no rate; give --num-requests, not --duration")
        settings.num_requests = max(1, math.ceil(load.rate * duration_s))


def _console(*, as_json: bool) -> Console:
    """A console that is wide enough for all figures; a file or a pipe has no width of its own."""
    console = Console(stderr=as_json)
    return console if console.is_terminal else Console(stderr=as_json, width=max(_FILE_WIDTH, console.width))


def _end_run(console: Console, outcome: tuple[RunDirectory, Any], outputs: Outputs, *, as_json: bool) -> int:
    run, summary = outcome
    if summary is None:
        console.print(f"interrupted before any request ended; go on with --resume {run.path}", highlight=False)
        return 130
    runs = [write_run(run, summary)]
    show_verdicts(console, runs, outputs.attainment)
    show_summary(console, run.settings, summary, sampled(run.samples()))
    _print_json(as_json, [(run, summary)])
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
    outputs: Outputs,
    *,
    as_json: bool,
    is_search: bool = False,
) -> int:
    expected = 1 if is_search else len(read_sweep(sweep.path).rates)
    runs = [write_run(run, summary) for run, summary in outcomes]
    if outcomes:
        by_rate = sorted(outcomes, key=lambda outcome: outcome[0].settings.rate or 0.0)
        show_verdicts(console, runs, outputs.attainment)
        show_sweep(console, [(run.settings, summary) for run, summary in by_rate])
        _print_json(as_json, by_rate)
        outputs.write(console, sweep.path, runs)
    if len(outcomes) < expected or not is_complete(outcomes[-1][0]):
        console.print(f"interrupted; go on with --resume {sweep.path}", highlight=False)
        return 130
    if is_search:
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


_ROWS = (
    ("TTFT", "ttft", 1e3, "ms"),
    ("TTFT scheduled", "ttft_scheduled", 1e3, "ms"),
    ("first chunk", "first_chunk", 1e3, "ms"),
    ("TPOT", "tpot", 1e3, "ms"),
    ("ITL", "itl", 1e3, "ms"),
    ("E2EL", "e2el", 1e3, "ms"),
    ("send lag", "send_lag", 1e3, "ms"),
    ("input tokens", "input_tokens", 1.0, ""),
    ("output tokens", "output_tokens", 1.0, ""),
)


def show_summary(console: Console, settings: RunSettings, summary: Summary, sampled: Sampled) -> None:
    """Print latencies, rates, the server's own figures, and the warnings of one run."""
    for name, window in (("all requests", summary.total), ("stable window", summary.stable)):
        if window is not None:
            console.print(_latencies(f"{settings.label or settings.workload}: {name}", window.figures))
    console.print(_rates(settings, summary))
    for name, distribution in summary.total.stages.items():
        console.print(
            f"  stage {name}: median {distribution.median * 1e3:.1f} ms, p90 {distribution.p90 * 1e3:.1f} ms "
            f"({distribution.n} requests)",
            highlight=False,
        )
    for name, share in sampled.cache_hits.items():
        console.print(f"  {name} cache: {share.part} hits of {share.whole} ({share.value:.1%})", highlight=False)
    for name, value in sampled.utilisation.items():
        console.print(f"  {name}: {value:.1%} busy on average", highlight=False)
    for warning in summary.warnings:
        console.print(f"! {warning}", style="yellow", highlight=False, markup=False)


def show_sweep(console: Console, runs: Sequence[tuple[RunSettings, Summary]]) -> None:
    """One line for each rate."""
    columns = ("sent", "TTFT\np50", "TTFT\np99", "TPOT\np50", "TPOT\np99", "good", "95 %", "tok/s")
    table = figures_table("req/s", *columns, "effective\ntok/s per\ndevice", title="by rate")
    for settings, summary in runs:
        total = summary.total
        table.add_row(
            "-" if settings.rate is None else f"{settings.rate:g}",
            f"{total.achieved_rate:.2f}",
            *(_quantiles(total.figures.get("ttft"))),
            *(_quantiles(total.figures.get("tpot"))),
            f"{total.attainment.value:.1%}",
            _interval(total.attainment).removesuffix(" %"),
            f"{total.output_token_throughput:.1f}",
            f"{total.effective_throughput_per_device:.1f}",
        )
    console.print(table)


def _latencies(title: str, figures: dict[str, Distribution]) -> Table:
    table = figures_table("", "mean", "min", "max", "median", "p75", "p90", "p99", "N", title=title)
    for label, name, scale, unit in _ROWS:
        one = figures.get(name)
        if one is not None:
            values = (one.mean, one.min, one.max, one.median, one.p75, one.p90, one.p99)
            table.add_row(f"{label} {unit}".strip(), *(_number(value * scale) for value in values), str(one.n))
    return table


def _rates(settings: RunSettings, summary: Summary) -> Table:
    windows = {"total": summary.total} | ({"stable": summary.stable} if summary.stable else {})
    windows |= summary.by_modality
    table, each = figures_table("", *windows), list(windows.values())
    row, slo = table.add_row, settings.slo
    row("requests (failed)", *(f"{one.num_requests} ({one.num_failed})" for one in each))
    row("duration s", *(f"{one.duration_s:.2f}" for one in each))
    row("planned → sent req/s", *(_planned(one) for one in each))
    row("finished req/s", *(f"{one.request_throughput:.3f}" for one in each))
    row("input tok/s", *(f"{one.input_token_throughput:.1f}" for one in each))
    row("output tok/s", *(f"{one.output_token_throughput:.1f}" for one in each))
    row("concurrency mean (max)", *(f"{one.mean_concurrency:.1f} ({one.max_concurrency})" for one in each))
    attained = (f"{one.attainment.value:.1%} ({_interval(one.attainment)})" for one in each)
    row(f"TTFT ≤ {slo.ttft_ms:g}, TPOT ≤ {slo.tpot_ms:g} ms", *attained)
    row("goodput req/s per device", *(f"{one.goodput_per_device:.3f}" for one in each))
    row("effective tok/s per device", *(f"{one.effective_throughput_per_device:.1f}" for one in each))
    return table


def _planned(window: WindowSummary) -> str:
    planned = "-" if window.planned_rate is None else f"{window.planned_rate:.2f}"
    return f"{planned} → {window.achieved_rate:.2f}"


def _interval(share: Share) -> str:
    return f"{100 * share.low:.1f}–{100 * share.high:.1f} %"


def _quantiles(one: Distribution | None) -> tuple[str, str]:
    return ("-", "-") if one is None else (_number(one.median * 1e3), _number(one.p99 * 1e3))


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.2f}"
