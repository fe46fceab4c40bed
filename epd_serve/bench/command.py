"""The work of ``epd-serve bench``: from its options to runs, tables on the terminal, and files."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from epd_serve.bench.compare import compare
from epd_serve.bench.deployed import read_candidates
from epd_serve.bench.plan import ClosedLoop, Trace, load_of
from epd_serve.bench.report import write_report
from epd_serve.bench.result_files import write_result_files
from epd_serve.bench.run import Run, new_directory, read_runs
from epd_serve.bench.session import Session
from epd_serve.bench.sweep import GoodputSearch, SearchRange, Sweep, parse_rates
from epd_serve.bench.terminal import show_run, show_runs
from epd_serve.bench.types import SLO, RunSettings
from epd_serve.bench.workloads import load_workload

#: The exit code where --fail-on-slo finds that a run missed the SLO.
SLO_MISSED = 3
_INTERRUPTED = 130
#: A search goes no lower than this part of its first rate.
_LOWEST = 1 / 64
#: A file or a pipe has no width of its own; this one fits all figures.
_FILE_WIDTH = 120


@dataclass(frozen=True, kw_only=True)
class Output:
    """What is made of finished runs.

    Attributes:
        report: whether to write report.html; without plotly it is left out with a word.
        as_json: whether to print the summaries as JSON, and all else to stderr.
        fail_on_slo: whether a run below ``attainment`` gives an exit code of its own.
        attainment: the share of good requests from which a load counts as served.
    """

    report: bool = True
    as_json: bool = False
    fail_on_slo: bool = False
    attainment: float = 0.9

    def console(self) -> Console:
        console = Console(stderr=self.as_json)
        return (
            console if console.is_terminal else Console(stderr=self.as_json, width=max(_FILE_WIDTH, console.width))
        )

    def write(self, console: Console, path: Path, runs: Sequence[Run], *, title: str = "") -> None:
        """Write report.html into ``path``, and print JSON where it is wanted."""
        if self.report:
            try:
                write_report(path / "report.html", runs, self.attainment, title=title)
            except ValueError as error:
                console.print(f"no report: {error}", highlight=False, markup=False)
            else:
                console.print(f"report: {path / 'report.html'}", highlight=False, markup=False, soft_wrap=True)
        if self.as_json:
            found = [
                {
                    "directory": str(run.path),
                    "settings": run.settings,
                    "summary": run.summary,
                    "tester": run.tester,
                }
                for run in runs
            ]
            sys.stdout.write(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n")

    def exit_code(self, console: Console, runs: Sequence[Run]) -> int:
        """Return 1 where requests failed, :data:`SLO_MISSED` where a run missed and ``fail_on_slo`` is set."""
        sentences = (
            [sentence for run in runs if (sentence := missed(run, self.attainment))] if self.fail_on_slo else []
        )
        code = SLO_MISSED if sentences else 0
        if failed := sum(run.total.num_failed for run in runs):
            sentences.append(f"{failed} of {sum(run.total.num_requests for run in runs)} requests failed")
            code = code or 1
        for sentence in sentences:
            console.print(sentence, style="red", highlight=False, markup=False, soft_wrap=True)
        return code


def missed(run: Run, attainment: float) -> str:
    """Return a sentence where fewer requests than ``attainment`` were good, else nothing."""
    share = run.total.attainment
    if share.value >= attainment:
        return ""
    slo = run.settings.slo
    return (
        f"SLO missed: {run.label}, {run.workload_name}, {run.load_text}: {share.part} of {share.whole} requests "
        f"({share.value:.1%}) had TTFT ≤ {slo.ttft_ms:g} ms and TPOT ≤ {slo.tpot_ms:g} ms, not {attainment:.0%}"
    )


def run_bench(
    settings: RunSettings,
    work_dir: Path,
    *,
    rates: str | None = None,
    goodput: tuple[float, float] | None = None,
    duration_s: float | None = None,
    compared: Sequence[Path] = (),
    api_key: str | None,
    output: Output,
) -> int:
    """Make a run, a sweep, a search or a comparison of deployment files.

    Args:
        rates: as typed, of a sweep.
        goodput: of a search, its relative precision and its highest rate.
        duration_s: seconds of requests at each rate, in place of the settings' number.

    Returns the exit code: that of ``output``, 1 where a deployment could not be measured, 130 where interrupted.
    """
    chosen = None if rates is None else parse_rates(rates)
    if chosen is not None and (settings.rate is not None or goodput):
        raise ValueError("--rates names all rates; leave --rate and --find-goodput out")
    if compared and goodput:
        raise ValueError("--compare goes with --rate or --rates, not with --find-goodput")
    load_workload(settings.workload)  # find its faults before anything is made
    if settings.rate is None and (
        goodput or settings.arrivals.partition(":")[0] in ("poisson", "constant", "gamma")
    ):
        settings.rate = 1.0
    if chosen:
        settings.rate = chosen[0]
    _check_load(settings, duration_s)
    candidates = read_candidates(compared)
    console = output.console()
    session = Session(console=console, api_key=api_key)
    path = new_directory(work_dir)
    measured: Sequence[float | None] = chosen or [settings.rate]
    failed: list[str] = []
    search: GoodputSearch | None = None
    sweep = Sweep(session=session, path=path, settings=settings, duration_s=duration_s)
    try:
        if candidates:
            runs, failed = compare(session, path, candidates, settings, rates=measured, duration_s=duration_s)
        elif goodput is not None:
            assert settings.rate is not None
            lowest, highest = settings.rate * _LOWEST, max(settings.rate, goodput[1])
            searched = SearchRange(start=settings.rate, lowest=lowest, highest=highest, precision=goodput[0])
            runs, search = sweep.find(searched, output.attainment)
        else:
            runs = sweep.over(measured)
    finally:
        with suppress(OSError):  # it is empty where no run could begin
            path.rmdir()
    if runs:
        if len(runs) == 1:
            show_run(console, runs[0])
        show_runs(console, runs, output.attainment)
        output.write(console, path, runs)
    console.print(f"in {path}", highlight=False, markup=False, soft_wrap=True)
    if failed:
        console.print(f"not measured: {', '.join(failed)}", style="red", highlight=False, markup=False)
        return 1
    wanted = 1 if search else len(measured) * max(1, len(candidates))
    if len(runs) < wanted or not runs[-1].is_complete:
        console.print("interrupted", style="red")
        return _INTERRUPTED
    if search is not None:
        _report_goodput(console, path, settings, search, output.attainment)
        # a search tries rates that are too high; only the best rate that it found decides the exit code
        runs = [run for run in runs if run.settings.rate == search.attained] or runs
    return output.exit_code(console, runs)


def redraw_bench(
    directories: Sequence[Path], ttft_ms: float | None, tpot_ms: float | None, *, output: Output
) -> int:
    """Report the runs in several directories again, all in one report, which goes into the first of them.

    Limits that are given replace those of the runs. Returns the exit code.
    """
    console = output.console()
    runs = [run for path in directories for run in read_runs(path)]
    for run in runs:
        run.settings.slo = slo_of(run.settings.slo, ttft_ms, tpot_ms)
        write_result_files(run)
    show_runs(console, runs, output.attainment)
    output.write(console, directories[0], runs)
    return output.exit_code(console, runs)


def slo_of(slo: SLO, ttft_ms: float | None, tpot_ms: float | None) -> SLO:
    """Return ``slo`` with the limits that are given in place of its own."""
    return SLO(
        ttft_ms=slo.ttft_ms if ttft_ms is None else ttft_ms, tpot_ms=slo.tpot_ms if tpot_ms is None else tpot_ms
    )


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


def _report_goodput(
    console: Console, path: Path, settings: RunSettings, search: GoodputSearch, attainment: float
) -> None:
    """Print the result of a search and write it into goodput.json."""
    found = {
        "attainment": attainment,
        "goodput": search.attained,
        "goodput_per_device": None if search.attained is None else search.attained / settings.num_devices,
        "lowest_rate_missed": search.missed,
    }
    (path / "goodput.json").write_bytes(msgspec.json.encode(found) + b"\n")
    if search.attained is None:
        text = f"no rate that was tried reaches {attainment:.0%} attainment"
    else:
        bound = "" if search.missed is not None else " or more: no rate was found that misses it"
        per_device = search.attained / settings.num_devices
        text = f"goodput {search.attained:.3g} req/s, {per_device:.3g} per device, at {attainment:.0%} attainment"
        text += bound
    console.print(text, style="bold", highlight=False)
