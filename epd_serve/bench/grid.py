"""Runs by deployment and load, as tables and verdicts, in the columns of the EPD-Serve paper's table 5."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Column, Table

from epd_serve.bench.result_files import common_metrics, performance_rows
from epd_serve.bench.run import Run
from epd_serve.bench.types import SLO

HEADER = (
    *("deployment", "devices", "TTFT ms", "TTFT p99", "TPOT ms", "TPOT p99", "good %", "95 %"),
    *("effective tok/s per device", "tok/s", "sent", "failed"),
)
#: Columns that are too wide for a terminal.
_REPORT_ONLY = ("devices", "tok/s", "sent")
#: Columns of AISBench's table on a terminal.
_STATISTICS = ("Average", "Median", "P90", "P99", "N")


@dataclass(frozen=True, kw_only=True)
class Grid:
    """All runs of one workload.

    Attributes:
        labels: deployments in the order of measurement.
        loads: requests per second, or concurrent requests of closed loops; ascending.
        runs: the latest run by label and load.
        per_device: whether loads are per device, because deployments have different numbers of devices.
        target: attainment from which a load counts as served.
    """

    workload: str
    labels: tuple[str, ...]
    loads: tuple[float, ...]
    runs: dict[tuple[str, float], Run]
    per_device: bool
    target: float

    @property
    def slo(self) -> SLO:
        return next(iter(self.runs.values())).settings.slo

    @property
    def slo_text(self) -> str:
        return f"TTFT ≤ {self.slo.ttft_ms:g} ms and TPOT ≤ {self.slo.tpot_ms:g} ms"

    @property
    def unit(self) -> str:
        if any(run.rate is None for run in self.runs.values()):
            return "at once"
        return "req/s per device" if self.per_device else "req/s"

    @property
    def decisive_load(self) -> float:
        """The load at which attainment differs most between deployments; with one deployment the highest."""

        def spread(load: float) -> tuple[int, float, float]:
            shares = [run.total.attainment.value for run in self.runs_at(load).values()]
            return len(shares), round(max(shares) - min(shares), 2), load

        return max(self.loads, key=spread)

    def runs_of(self, label: str) -> list[tuple[float, Run]]:
        """Return the loads of one deployment with their runs, ascending."""
        return [(load, self.runs[label, load]) for load in self.loads if (label, load) in self.runs]

    def runs_at(self, load: float) -> dict[str, Run]:
        """Return the runs at one load by label."""
        return {label: self.runs[label, load] for label in self.labels if (label, load) in self.runs}

    def verdict(self, label: str) -> str:
        """Return a sentence: the highest load at which a deployment keeps the SLO, and the limit that breaks."""
        held: float | None = None
        for load, run in self.runs_of(label):
            total = run.total
            if total.attainment.value < self.target:
                served = "at no measured load" if held is None else f"up to {held:.4g} {self.unit}"
                if total.num_failed > (1 - self.target) * total.num_requests:
                    kind = max(total.failures, key=lambda name: total.failures[name])
                    reason = f"{total.num_failed} of {total.num_requests} requests failed ({kind})"
                else:
                    worse = total.tpot_attainment.value < total.ttft_attainment.value
                    reason = f"{'TPOT' if worse else 'TTFT'} breaks first"
                return f"{label} keeps the SLO {served}; at {load:.4g} {reason}: {_describe_attainment(run)}."
            held = load
        attained = _describe_attainment(run)
        return f"{label} keeps the SLO at all measured loads, up to {held:.4g} {self.unit}: {attained}."

    def rows(self, load: float) -> list[tuple[str, ...]]:
        """Return the cells below HEADER, one row per deployment."""
        return [(label, *_cells(run)) for label, run in self.runs_at(load).items()]


def make_grids(runs: Sequence[Run], target: float) -> list[Grid]:
    """Return one grid per workload, in the order of measurement."""
    grids = []
    for workload in dict.fromkeys(run.workload_name for run in runs):
        some = [run for run in runs if run.workload_name == workload]
        per_device = len({run.settings.num_devices for run in some}) > 1
        keyed = {}
        for run in some:
            if run.rate is None:
                load = float(run.settings.arrivals.rpartition(":")[2])
            else:  # rounded, because the rate of a trace varies a little between runs
                load = round(run.rate / (run.settings.num_devices if per_device else 1), 3)
            keyed[run.label, load] = run
        grids.append(
            Grid(
                workload=workload,
                labels=tuple(dict.fromkeys(run.label for run in some)),
                loads=tuple(sorted({load for _, load in keyed})),
                runs=keyed,
                per_device=per_device,
                target=target,
            )
        )
    return grids


def _describe_attainment(run: Run) -> str:
    one = run.total.attainment
    return f"{one.value:.0%} of {one.whole} requests were good (95 % interval {one.low:.0%} to {one.high:.0%})"


def _cells(run: Run) -> tuple[str, ...]:
    total, good = run.total, run.total.attainment
    latencies = []
    for name in ("ttft_scheduled", "tpot"):
        for statistic in ("mean", "p99"):
            value = total.ms(name, statistic)
            digits = 0 if value is None or value >= 100 else 1 if value >= 10 else 2
            latencies.append("none" if value is None else f"{value:.{digits}f}")
    return (
        str(run.settings.num_devices),
        *latencies,
        f"{100 * good.value:.1f}",
        f"{100 * good.low:.0f}–{100 * good.high:.0f}",
        f"{total.effective_throughput_per_device:.1f}",
        f"{total.output_token_throughput:.1f}",
        str(total.num_requests),
        str(total.num_failed),
    )


def show_run(console: Console, run: Run) -> None:
    """Print the figures of one run under AISBench's names, and its warnings."""
    header, *rows = performance_rows(run)
    table = _new_table("", *_STATISTICS, title=f"{run.label}: {run.workload_name}, {run.load_text}")
    for row in rows:
        if row[1] == "total":
            table.add_row(row[0], *(_shorten(row[header.index(name)]) for name in _STATISTICS))
    console.print(table)
    table = _new_table("", "total")
    for name, by_stage in common_metrics(run).items():
        table.add_row(name, str(by_stage["total"]))
    console.print(table)
    for warning in run.summary.warnings:
        console.print(f"! {warning}", style="yellow", highlight=False, markup=False)


def show_runs(console: Console, runs: Sequence[Run], target: float) -> None:
    """Print a verdict for each deployment and a table of all loads; ``target`` attainment counts as served."""
    for grid in make_grids(runs, target):
        for label in grid.labels:
            console.print(grid.verdict(label), style="bold", highlight=False, markup=False, soft_wrap=True)
        console.print(f"{grid.workload}; good: {grid.slo_text}", highlight=False, markup=False)
        names = [name for name in HEADER[1:] if name not in _REPORT_ONLY]
        heads = [name.replace(" per device", "\nper device").replace(" ", "\n", 1) for name in names]
        table = _new_table(HEADER[0], grid.unit.replace(" per ", "\nper "), *heads)
        for load in grid.loads:
            for row in grid.rows(load):
                cells = dict(zip(HEADER, row, strict=True))
                table.add_row(row[0], f"{load:.4g}", *(cells[name] for name in names))
        console.print(table)


def _shorten(cell: str) -> str:
    number, _, unit = cell.partition(" ")
    value, unit = float(number), unit.replace("token", "tok")
    return f"{value:.0f} {unit}" if value >= 100 or "." not in number else f"{value:.2f} {unit}"


def _new_table(first: str, *columns: str, title: str = "") -> Table:
    figures = [Column(name, justify="right") for name in columns]
    return Table(
        Column(first, overflow="fold"),
        *figures,
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
    )
