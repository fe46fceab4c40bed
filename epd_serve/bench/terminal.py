"""Tables of runs on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Column, Table

from epd_serve.bench.grid import HEADER, make_grids
from epd_serve.bench.run import Run
from epd_serve.bench.summary import MS
from epd_serve.bench.types import Distribution, WindowSummary

_ROWS = (
    ("TTFT ms", "ttft", MS),
    ("TTFT scheduled ms", "ttft_scheduled", MS),
    ("first chunk ms", "first_chunk", MS),
    ("TPOT ms", "tpot", MS),
    ("ITL ms", "itl", MS),
    ("E2EL ms", "e2el", MS),
    ("send lag ms", "send_lag", MS),
    ("input tokens", "input_tokens", 1.0),
    ("output tokens", "output_tokens", 1.0),
)


def show_run(console: Console, run: Run) -> None:
    """Print latencies, rates, times by stage, and the warnings of one run."""
    summary = run.summary
    for name, window in (("all requests", summary.total), ("stable window", summary.stable)):
        if window is not None:
            console.print(_latencies(f"{run.settings.label or run.settings.workload}: {name}", window.figures))
    console.print(_rates(run))
    for name, one in summary.total.stages.items():
        text = f"  stage {name}: median {MS * one.median:.1f} ms, p90 {MS * one.p90:.1f} ms ({one.n} requests)"
        console.print(text, highlight=False)
    for warning in summary.warnings:
        console.print(f"! {warning}", style="yellow", highlight=False, markup=False)


def show_runs(console: Console, runs: Sequence[Run], share: float) -> None:
    """Print a sentence for each deployment, and the paper's table 5 at each load.

    ``share`` of good requests: from it on a load counts as served.
    """
    for grid in make_grids(runs, share):
        for label in grid.labels:
            console.print(grid.verdict(label), style="bold", highlight=False, markup=False, soft_wrap=True)
        console.print(f"{grid.workload}; good: {grid.slo_text}", highlight=False, markup=False)
        table = _figures_table(HEADER[0], grid.unit.replace(" per ", "\nper "), *_short(HEADER[1:]))
        for load in grid.loads:
            for label, *cells in grid.rows(load):
                table.add_row(label, f"{load:.4g}", *cells)
        console.print(table)


def _short(names: Sequence[str]) -> list[str]:
    return [name.replace(" per device", "\nper device").replace(" ", "\n", 1) for name in names]


def _figures_table(first: str, *columns: str, title: str = "") -> Table:
    """A table of names and, to their right, figures."""
    figures = [Column(name, justify="right") for name in columns]
    return Table(
        Column(first, no_wrap=True), *figures, title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0
    )


def _latencies(title: str, figures: dict[str, Distribution]) -> Table:
    table = _figures_table("", "mean", "min", "max", "median", "p75", "p90", "p99", "N", title=title)
    for label, name, scale in _ROWS:
        if (one := figures.get(name)) is not None:
            values = (one.mean, one.min, one.max, one.median, one.p75, one.p90, one.p99)
            table.add_row(label, *(_number(value * scale) for value in values), str(one.n))
    return table


def _rates(run: Run) -> Table:
    summary, slo = run.summary, run.settings.slo
    windows = {"total": summary.total} | ({"stable": summary.stable} if summary.stable else {})
    windows |= summary.by_modality
    table, each = _figures_table("", *windows), list(windows.values())
    row = table.add_row
    row("requests (failed)", *(f"{one.num_requests} ({one.num_failed})" for one in each))
    row("duration s", *(f"{one.duration_s:.2f}" for one in each))
    row("planned → sent req/s", *(_planned(one) for one in each))
    row("finished req/s", *(f"{one.request_throughput:.3f}" for one in each))
    row("input tok/s", *(f"{one.input_token_throughput:.1f}" for one in each))
    row("output tok/s", *(f"{one.output_token_throughput:.1f}" for one in each))
    row("concurrency mean (max)", *(f"{one.mean_concurrency:.1f} ({one.max_concurrency})" for one in each))
    row(f"TTFT ≤ {slo.ttft_ms:g}, TPOT ≤ {slo.tpot_ms:g} ms", *(_attainment(one) for one in each))
    row("goodput req/s per device", *(f"{one.goodput_per_device:.3f}" for one in each))
    row("effective tok/s per device", *(f"{one.effective_throughput_per_device:.1f}" for one in each))
    return table


def _planned(window: WindowSummary) -> str:
    planned = "-" if window.planned_rate is None else f"{window.planned_rate:.2f}"
    return f"{planned} → {window.achieved_rate:.2f}"


def _attainment(window: WindowSummary) -> str:
    one = window.attainment
    return f"{one.value:.1%} ({100 * one.low:.1f}–{100 * one.high:.1f} %)"


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.2f}"
