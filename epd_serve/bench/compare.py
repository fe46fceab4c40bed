"""``--compare``: deployments brought up in turn on the same devices under the same schedule (003 table 5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.table import Column, Table

from epd_serve.bench.deployed import Candidate, deployed
from epd_serve.bench.outputs import Outputs, read_runs, write_run
from epd_serve.bench.report.series import Grid, grids
from epd_serve.bench.report.table import SHORT_HEADER, rows
from epd_serve.bench.report.verdict import verdicts
from epd_serve.bench.run_directory import RunDirectory, write_json
from epd_serve.bench.session import Session
from epd_serve.bench.summary import Measured, file_name
from epd_serve.bench.sweep import Sweep, is_complete
from epd_serve.bench.types import RunSettings


class CompareFile(msgspec.Struct, kw_only=True):
    """compare.json, so that a comparison can be gone on with.

    Attributes:
        files: the deployments' files, as absolute paths, in their order.
        rates: as given; empty for a load without a rate.
        failed: why a deployment could not be measured, by its label.
    """

    settings: RunSettings
    files: list[str]
    rates: list[float] = []
    duration_s: float | None = None
    failed: dict[str, str] = {}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One schedule for all: rates, seeds and requests are the same for each deployment.

    Attributes:
        path: the comparison's directory; each deployment has a directory in it, with a sweep.
    """

    session: Session
    path: Path
    file: CompareFile

    def run(self, candidates: Sequence[Candidate]) -> tuple[list[Measured], bool]:
        """Measure each deployment in turn; return the runs, and whether every deployment was measured in full.

        A deployment that does not come up is noted in the comparison's file, and the next one follows.
        """
        console, found = self.session.console, list[Measured]()
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
        if (found := self._measured_already(folder)) is not None:
            return found, True
        session = replace(self.session, api_key=candidate.api_key or self.session.api_key)
        with deployed(candidate, folder / "up.log") as url:
            settings = msgspec.structs.replace(
                self.file.settings,
                base_url=url,
                label=candidate.label,
                model=candidate.config.model_name,
                num_devices=candidate.num_devices,
            )
            sweep = Sweep(
                session=session,
                path=folder,
                settings=settings,
                duration_s=self.file.duration_s,
            )
            outcomes = sweep.over(self.file.rates)
        is_whole = len(outcomes) == max(1, len(self.file.rates)) and all(is_complete(run) for run, _ in outcomes)
        return [write_run(run, summary) for run, summary in outcomes], is_whole

    def _measured_already(self, folder: Path) -> list[Measured] | None:
        """All runs of a deployment that was measured to its end, None of others."""
        runs = [RunDirectory.open(file.parent) for file in folder.glob("*/run.json")]
        if len(runs) < max(1, len(self.file.rates)) or not all(map(is_complete, runs)):
            return None
        return read_runs(folder)

    def _write(self) -> None:
        write_json(self.path / "compare.json", self.file)


def show_verdicts(console: Console, runs: Sequence[Measured], share: float) -> None:
    """Print a sentence on each deployment, in the words of the report."""
    for sentence in verdicts(runs, share):
        console.print(sentence, style="bold", highlight=False, markup=False, soft_wrap=True)


def show_comparison(console: Console, runs: Sequence[Measured], share: float) -> None:
    """The paper's table 5 for this machine, at the load that tells deployments apart, then attainment at all."""
    show_verdicts(console, runs, share)
    for grid in grids(runs, share):
        load = grid.telling
        console.print(f"{grid.workload} at {load:.4g} {grid.unit}; good: {grid.slo_text}", highlight=False)
        table = figures_table(*SHORT_HEADER)
        for label, cells in rows(grid, load):
            texts = [f"[bold green]{cell.text}[/]" if cell.is_best else cell.text for cell in cells]
            table.add_row(label, *texts)
        console.print(table)
        if len(grid.loads) > 1:
            console.print(_attainments(grid))


def figures_table(first: str, *columns: str, title: str = "") -> Table:
    """A table of names and, to their right, figures."""
    figures = [Column(name, justify="right") for name in columns]
    return Table(
        Column(first, no_wrap=True), *figures, title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0
    )


def _attainments(grid: Grid) -> Table:
    title = f"good requests (%) by {grid.load_title}"
    table = figures_table("deployment", *grid.load_texts, "goodput", title=title)
    for label in grid.labels:
        shares = (grid.good_percent(label, load) for load in grid.loads)
        texts = ("" if share is None else f"{share:.1f}" for share in shares)
        table.add_row(label, *texts, f"{grid.goodput(label):.3g}")
    return table


def run_comparison(comparison: Comparison, candidates: Sequence[Candidate], outputs: Outputs) -> int:
    """All of it, with its table and report. Returns the exit code: 0; 1 where a deployment did not come up or did
    not answer; 130 where it was interrupted; that of ``outputs`` where the SLO was missed."""
    console = comparison.session.console
    runs, is_whole = comparison.run(candidates)
    if runs:
        show_comparison(console, runs, outputs.attainment)
        outputs.write(console, comparison.path, runs)
    console.print(f"in {comparison.path}", highlight=False, markup=False, soft_wrap=True)
    if failed := comparison.file.failed:
        console.print(f"not measured: {', '.join(failed)}", style="red", highlight=False, markup=False)
        return 1
    if not is_whole:
        console.print(f"interrupted; go on with --resume {comparison.path}", highlight=False, markup=False)
        return 130
    return outputs.exit_code(console, runs)
