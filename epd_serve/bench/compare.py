"""``--compare``: deployments brought up in turn on the same devices under the same schedule (003 table 5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from epd_serve.bench.deployed import Candidate, deployed
from epd_serve.bench.outputs import write_run
from epd_serve.bench.report.rates import slo_text
from epd_serve.bench.report.series import Grid, grids, window
from epd_serve.bench.report.table import HEADER, rows
from epd_serve.bench.results import Measured, file_name
from epd_serve.bench.session import Session
from epd_serve.bench.sweep import Sweep, is_complete
from epd_serve.bench.types import RunSettings, Workload


class CompareFile(msgspec.Struct, kw_only=True):
    """compare.json, so that a comparison can be gone on with.

    Attributes:
        files: of the deployments, as absolute paths, in their order.
        failed: why a deployment could not be measured, by its label.
    """

    settings: RunSettings
    files: list[str]
    rates: list[float]
    duration_s: float | None = None
    failed: dict[str, str] = {}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One schedule for all: rates, seeds and requests are the same for each deployment.

    Attributes:
        path: of the comparison; each deployment has a directory in it, with a sweep.
    """

    session: Session
    path: Path
    file: CompareFile
    load_workload: Callable[[], Workload]

    def run(self, console: Console, candidates: Sequence[Candidate]) -> tuple[list[Measured], bool]:
        """What was measured, and whether that is all. A deployment that does not come up is passed over."""
        found: list[Measured] = []
        is_whole = True
        self._write()
        for number, candidate in enumerate(candidates, start=1):
            name = f"{candidate.label} ({number} of {len(candidates)})"
            console.print(f"{name}: {candidate.file}", style="bold", highlight=False, markup=False, soft_wrap=True)
            try:
                runs, is_complete_sweep = self._one(candidate)
            except ValueError as error:
                console.print(str(error), style="red", highlight=False, markup=False, soft_wrap=True)
                self.file.failed[candidate.label] = str(error)
                self._write()
                is_whole = False
                continue
            found += runs
            if not is_complete_sweep:
                return found, False
        return found, is_whole

    def _one(self, candidate: Candidate) -> tuple[list[Measured], bool]:
        folder = self.path / file_name(candidate.label)
        folder.mkdir(parents=True, exist_ok=True)
        with deployed(candidate, folder / "up.log") as url:
            sweep = Sweep(
                session=replace(self.session, api_key=candidate.api_key or self.session.api_key),
                path=folder,
                settings=msgspec.structs.replace(
                    self.file.settings,
                    base_url=url,
                    label=candidate.label,
                    model=candidate.config.model_name,
                    num_devices=candidate.num_devices,
                ),
                load_workload=self.load_workload,
                duration_s=self.file.duration_s,
            )
            outcomes = sweep.over(self.file.rates)
        is_whole = len(outcomes) == len(self.file.rates) and all(is_complete(run) for run, _ in outcomes)
        return [write_run(run, summary) for run, summary in outcomes], is_whole

    def _write(self) -> None:
        half = self.path / ".compare.json"
        half.write_bytes(msgspec.json.format(msgspec.json.encode(self.file), indent=2))
        half.replace(self.path / "compare.json")


def show_comparison(console: Console, runs: Sequence[Measured]) -> None:
    """The paper's table 5 for this machine, at the load that tells deployments apart, then attainment at all."""
    for grid in grids(runs):
        load = grid.telling
        title = f"{grid.workload} at {load:.4g} {grid.unit}; means; good: {slo_text(grid)}"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
        for name in HEADER:
            table.add_column(name, justify="left" if name == HEADER[0] else "right")
        for label, cells in rows(grid, load):
            texts = [f"[bold green]{cell.text}[/]" if cell.is_best else cell.text for cell in cells]
            table.add_row(label, *texts)
        console.print(table)
        if len(grid.loads) > 1:
            console.print(_attainments(grid))


def _attainments(grid: Grid) -> Table:
    table = Table(title=f"good requests (%) by {grid.load_title}", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("deployment")
    for text in grid.load_texts:
        table.add_column(text, justify="right")
    table.add_column("goodput", justify="right")
    for label in grid.labels:
        shares = [
            f"{100 * window(grid.runs[label, load]).attainment.value:.1f}" if (label, load) in grid.runs else ""
            for load in grid.loads
        ]
        table.add_row(label, *shares, f"{grid.goodput(label):.3g}")
    return table
