"""Print runs as tables on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Column, Table

from epd_serve.bench.grid import HEADER, make_grids
from epd_serve.bench.result_files import common_metrics, performance_rows
from epd_serve.bench.run import Run


def show_run(console: Console, run: Run) -> None:
    """Print the figures of one run under AISBench's names, and its warnings."""
    header, *rows = performance_rows(run)
    table = _new_table(*header[:1], *header[2:], title=f"{run.label}: {run.workload_name}, {run.load_text}")
    for name, stage, *cells, number in rows:
        if stage == "total":
            table.add_row(name, *map(_shorten, cells), number)
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
        names = [name.replace(" per device", "\nper device").replace(" ", "\n", 1) for name in HEADER[1:]]
        table = _new_table(HEADER[0], grid.unit.replace(" per ", "\nper "), *names)
        for load in grid.loads:
            for label, *cells in grid.rows(load):
                table.add_row(label, f"{load:.4g}", *cells)
        console.print(table)


def _shorten(cell: str) -> str:
    number, _, unit = cell.partition(" ")
    value, unit = float(number), unit.replace("token", "tok")
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.2f} {unit}"


def _new_table(first: str, *columns: str, title: str = "") -> Table:
    figures = [Column(name, justify="right") for name in columns]
    return Table(
        Column(first, no_wrap=True), *figures, title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0
    )
