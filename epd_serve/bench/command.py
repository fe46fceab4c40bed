"""``epd-serve bench``: make runs, print tables, write files."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from rich.console import Console

from epd_serve.bench.deployed import Candidate, deployed, read_candidates
from epd_serve.bench.grid import show_run, show_runs
from epd_serve.bench.plan import RATED, parse_arrivals
from epd_serve.bench.report import write_report
from epd_serve.bench.result_files import file_name, write_result_files
from epd_serve.bench.run import Run, new_directory, read_runs
from epd_serve.bench.session import GoodputSearch, Session, parse_rates
from epd_serve.bench.types import SLO, RunSettings
from epd_serve.bench.workloads import load_workload

#: Exit code of --fail-on-slo if a run misses the SLO.
SLO_MISSED = 3
_INTERRUPTED = 130
#: A search stops at this fraction of its first rate.
_LOWEST = 1 / 64
#: Width of tables in a file or a pipe.
_FILE_WIDTH = 120


@dataclass(frozen=True, kw_only=True)
class Output:
    """Options for showing finished runs.

    Attributes:
        report: whether to write report.html, if plotly is installed.
        as_json: whether to print summaries as JSON to stdout, and everything else to stderr.
        fail_on_slo: whether a run below ``attainment`` sets the exit code.
        attainment: share of good requests from which a load counts as served.
    """

    report: bool
    as_json: bool
    fail_on_slo: bool
    attainment: float
    console: Console = field(default_factory=Console, init=False)

    def __post_init__(self) -> None:
        self.console.stderr = self.as_json
        if not self.console.is_terminal:
            self.console.width = max(_FILE_WIDTH, self.console.width)

    def say(self, text: str, *, style: str | None = None) -> None:
        self.console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    def write(self, path: Path, runs: Sequence[Run]) -> None:
        """Write report.html to ``path`` and print JSON, if requested; name the files."""
        written = ""
        if self.report:
            try:
                write_report(path / "report.html", runs, self.attainment)
            except ImportError:
                self.say("no report: plotly is missing; run pip install '.[bench]' in epd-serve's clone")
            else:
                written = " and report.html"
        self.say(f"results{written} in {path}")
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

    def exit_code(self, runs: Sequence[Run]) -> int:
        """Return SLO_MISSED if ``fail_on_slo`` is set and a run missed, else 1 if requests failed, else 0."""
        missed = [run for run in runs if self.fail_on_slo and run.total.attainment.value < self.attainment]
        for run in missed:
            slo, share = run.settings.slo, run.total.attainment
            name = f"{run.label}, {run.workload_name}, {run.load_text}"
            limits = f"TTFT ≤ {slo.ttft_ms:g} ms and TPOT ≤ {slo.tpot_ms:g} ms, not {self.attainment:.0%}"
            self.say(f"SLO missed: {name}: {share.part} of {share.whole} requests had {limits}", style="red")
        if failed := sum(run.total.num_failed for run in runs):
            num_requests = sum(run.total.num_requests for run in runs)
            self.say(f"{failed} of {num_requests} requests failed", style="red")
        return SLO_MISSED if missed else int(failed > 0)


def run_bench(
    settings: RunSettings,
    work_dir: Path,
    *,
    rates: str | None = None,
    goodput: tuple[float, float] | None = None,
    compared: Sequence[Path] = (),
    api_key: str | None,
    output: Output,
) -> int:
    """Measure one rate or several, search for goodput, or compare deployment files; return the exit code.

    Args:
        rates: rates as typed.
        goodput: relative precision and highest rate of a search.
    """
    chosen = None if rates is None else parse_rates(rates)
    if chosen is not None and (settings.rate is not None or goodput):
        raise ValueError("--rates names all rates; leave --rate and --find-goodput out")
    if compared and goodput:
        raise ValueError("--compare works with --rate or --rates, not with --find-goodput")
    load_workload(settings.workload)  # report its faults before anything starts
    if settings.rate is None and (goodput or settings.arrivals.partition(":")[0] in RATED):
        settings.rate = 1.0
    if chosen:
        settings.rate = chosen[0]
    _check_load(settings)
    candidates = read_candidates(compared)
    search = None
    if goodput is not None:
        start = settings.rate or 1.0
        search = GoodputSearch(
            start=start, lowest=start * _LOWEST, highest=max(start, goodput[1]), precision=goodput[0]
        )
    path = new_directory(work_dir)
    measured: Sequence[float | None] = chosen or [settings.rate]
    session = Session(console=output.console, api_key=api_key)
    failed: list[str] = []
    try:
        if candidates:
            runs, failed = _compare(session, path, settings, candidates, measured, output)
        elif search is not None:
            runs = session.find_goodput(path, settings, search, output.attainment)
        else:
            runs = list(session.measure_rates(path, settings, measured))
    finally:
        with suppress(OSError):  # not empty
            path.rmdir()
    if runs:
        if len(runs) == 1:
            show_run(output.console, runs[0])
        show_runs(output.console, runs, output.attainment)
        output.write(path, runs)
    if failed:
        output.say(f"not measured: {', '.join(failed)}", style="red")
        return 1
    wanted = 1 if search else len(measured) * max(1, len(candidates))
    if len(runs) < wanted or not runs[-1].is_complete:
        output.say("interrupted", style="red")
        return _INTERRUPTED
    if search is not None:
        _report_goodput(path, settings, search, output)
        # a search also tries excessive rates; only the best rate sets the exit code
        runs = [run for run in runs if run.settings.rate == search.attained] or runs
    return output.exit_code(runs)


def redraw_bench(
    directories: Sequence[Path], ttft_ms: float | None, tpot_ms: float | None, *, output: Output
) -> int:
    """Report on existing runs, under new limits where given; the report goes into the first directory."""
    runs = [run for path in directories for run in read_runs(path)]
    for run in runs:
        run.settings.slo = slo_of(run.settings.slo, ttft_ms, tpot_ms)
        write_result_files(run)
    show_runs(output.console, runs, output.attainment)
    output.write(directories[0], runs)
    return output.exit_code(runs)


def slo_of(slo: SLO, ttft_ms: float | None, tpot_ms: float | None) -> SLO:
    """Return ``slo`` with its limits replaced by the given ones."""
    return SLO(
        ttft_ms=slo.ttft_ms if ttft_ms is None else ttft_ms, tpot_ms=slo.tpot_ms if tpot_ms is None else tpot_ms
    )


def _compare(
    session: Session,
    path: Path,
    settings: RunSettings,
    candidates: Sequence[Candidate],
    rates: Sequence[float | None],
    output: Output,
) -> tuple[list[Run], list[str]]:
    """Start deployments one after the other and send each the same requests at each rate.

    Returns the runs, and the labels of deployments that could not be measured.
    """
    runs: list[Run] = []
    failed: list[str] = []
    for candidate in candidates:
        output.say(f"{candidate.label}: {candidate.file}", style="bold")
        folder = path / file_name(candidate.label)
        folder.mkdir()
        try:
            with deployed(candidate, folder / "up.log") as url:
                wanted = msgspec.structs.replace(
                    settings,
                    base_url=url,
                    label=candidate.label,
                    model=candidate.config.model_name,
                    num_devices=candidate.num_devices,
                )
                runs += session.measure_rates(folder, wanted, rates)
        except ValueError as error:
            output.say(str(error), style="red")
            failed.append(candidate.label)
            continue
        if not runs or not runs[-1].is_complete:
            break
    return runs, failed


def _check_load(settings: RunSettings) -> None:
    """Raise ValueError for invalid arrivals, or ones that contradict other settings."""
    arrivals = parse_arrivals(settings)
    if settings.max_concurrency is not None and arrivals.concurrency is not None:
        raise ValueError(f"arrivals {settings.arrivals} set the concurrency; leave --max-concurrency out")
    if settings.time_scale != 1.0 and arrivals.kind != "trace":
        raise ValueError("--time-scale needs --arrivals trace")
    if settings.duration_s is not None:
        if arrivals.kind not in RATED:
            raise ValueError(f"arrivals {settings.arrivals} lack a rate; give --num-requests, not --duration")
        settings.num_requests = max(1, math.ceil(arrivals.rate * settings.duration_s))


def _report_goodput(path: Path, settings: RunSettings, search: GoodputSearch, output: Output) -> None:
    """Print the result of a search and write goodput.json."""
    per_device = None if search.attained is None else search.attained / settings.num_devices
    found = {
        "attainment": output.attainment,
        "goodput": search.attained,
        "goodput_per_device": per_device,
        "lowest_rate_missed": search.missed,
    }
    (path / "goodput.json").write_bytes(msgspec.json.encode(found) + b"\n")
    text = f"no measured rate reaches {output.attainment:.0%} attainment"
    if per_device is not None:
        bound = "" if search.missed is not None else " or more: no measured rate missed it"
        text = (
            f"goodput {search.attained:.3g} req/s, {per_device:.3g} per device, at {output.attainment:.0%}{bound}"
        )
    output.say(text, style="bold")
