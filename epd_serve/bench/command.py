"""The work of ``epd-serve bench``: from its options to runs, tables on the terminal, and files."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from rich.console import Console

from epd_serve.bench.deployed import Candidate, deployed, read_candidates
from epd_serve.bench.plan import ClosedLoop, Trace, load_of
from epd_serve.bench.report import write_report
from epd_serve.bench.result_files import file_name, write_result_files
from epd_serve.bench.run import Run, new_directory, read_runs
from epd_serve.bench.session import Session
from epd_serve.bench.sweep import GoodputSearch, Sweep, parse_rates
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
    """Destinations of the figures of finished runs.

    Attributes:
        report: whether to write report.html; without plotly it is left out with a remark.
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
        width = console.width if console.is_terminal else max(_FILE_WIDTH, console.width)
        return Console(stderr=self.as_json, width=width)

    def write(self, console: Console, path: Path, runs: Sequence[Run], *, title: str = "") -> None:
        """Write report.html into ``path``, and print JSON where it is wanted."""
        if self.report:
            try:
                write_report(path / "report.html", runs, self.attainment, title=title)
            except ImportError:
                _say(console, "no report: it needs plotly: pip install '.[bench]' in epd-serve's clone")
            else:
                _say(console, f"report: {path / 'report.html'}")
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
        missed = [run for run in runs if self.fail_on_slo and run.total.attainment.value < self.attainment]
        for run in missed:
            slo, share = run.settings.slo, run.total.attainment
            name = f"{run.label}, {run.workload_name}, {run.load_text}"
            limits = f"TTFT ≤ {slo.ttft_ms:g} ms and TPOT ≤ {slo.tpot_ms:g} ms, not {self.attainment:.0%}"
            text = f"SLO missed: {name}: {share.part} of {share.whole} requests had {limits}"
            _say(console, text, style="red")
        failed = sum(run.total.num_failed for run in runs)
        if failed:
            text = f"{failed} of {sum(run.total.num_requests for run in runs)} requests failed"
            _say(console, text, style="red")
        return SLO_MISSED if missed else int(failed > 0)


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
    search = None
    if goodput is not None:
        start = settings.rate or 1.0
        search = GoodputSearch(
            start=start, lowest=start * _LOWEST, highest=max(start, goodput[1]), precision=goodput[0]
        )
    console = output.console()
    path = new_directory(work_dir)
    measured: Sequence[float | None] = chosen or [settings.rate]
    sweep = Sweep(
        session=Session(console=console, api_key=api_key), path=path, settings=settings, duration_s=duration_s
    )
    failed: list[str] = []
    try:
        if candidates:
            runs, failed = _compare(sweep, candidates, measured)
        else:
            runs = sweep.over(measured) if search is None else sweep.find(search, output.attainment)
    finally:
        with suppress(OSError):  # it is empty where no run could begin
            path.rmdir()
    if runs:
        if len(runs) == 1:
            show_run(console, runs[0])
        show_runs(console, runs, output.attainment)
        output.write(console, path, runs)
    _say(console, f"in {path}")
    if failed:
        _say(console, f"not measured: {', '.join(failed)}", style="red")
        return 1
    wanted = 1 if search else len(measured) * max(1, len(candidates))
    if len(runs) < wanted or not runs[-1].is_complete:
        _say(console, "interrupted", style="red")
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


def _compare(
    sweep: Sweep, candidates: Sequence[Candidate], rates: Iterable[float | None]
) -> tuple[list[Run], list[str]]:
    """Bring deployments up in turn on the same devices, and send each the same requests at each rate.

    Returns the runs, and the labels of the deployments that could not be measured. An interrupted run is the last.
    """
    runs: list[Run] = []
    failed: list[str] = []
    for candidate in candidates:
        _say(sweep.session.console, f"{candidate.label}: {candidate.file}", style="bold")
        folder = sweep.path / file_name(candidate.label)
        folder.mkdir()
        try:
            with deployed(candidate, folder / "up.log") as url:
                settings = msgspec.structs.replace(
                    sweep.settings,
                    base_url=url,
                    label=candidate.label,
                    model=candidate.config.model_name,
                    num_devices=candidate.num_devices,
                )
                session = replace(sweep.session, api_key=candidate.api_key or sweep.session.api_key)
                runs += replace(sweep, session=session, path=folder, settings=settings).over(rates)
        except ValueError as error:
            _say(sweep.session.console, str(error), style="red")
            failed.append(candidate.label)
            continue
        if not runs or not runs[-1].is_complete:
            break
    return runs, failed


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
    per_device = None if search.attained is None else search.attained / settings.num_devices
    found = {
        "attainment": attainment,
        "goodput": search.attained,
        "goodput_per_device": per_device,
        "lowest_rate_missed": search.missed,
    }
    (path / "goodput.json").write_bytes(msgspec.json.encode(found) + b"\n")
    text = f"no rate that was tried reaches {attainment:.0%} attainment"
    if per_device is not None:
        bound = "" if search.missed is not None else " or more: no rate was found that misses it"
        text = f"goodput {search.attained:.3g} req/s, {per_device:.3g} per device, at {attainment:.0%}{bound}"
    _say(console, text, style="bold")


def _say(console: Console, text: str, *, style: str | None = None) -> None:
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)
