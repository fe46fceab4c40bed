"""Files that a run leaves besides its records: AISBench's, vLLM's, the report and its pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from epd_serve.bench.aisbench import write_aisbench
from epd_serve.bench.results import Measured
from epd_serve.bench.run_directory import RunDirectory
from epd_serve.bench.summary import summarise
from epd_serve.bench.types import SLO, Summary
from epd_serve.bench.vllm_result import vllm_result

REPORT = "report.html"
SUMMARY = "summary.json"
#: The exit code where --fail-on-slo finds that a run missed.
SLO_MISSED = 3


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Attributes:
    report: whether plots are wanted; without plotly they are left out with a word.
    png: whether they are wanted as pictures too.
    fail_on_slo: whether a run below ``attainment`` gives an exit code of its own.
    attainment: share of good requests from which a load counts as served, in plots too.
    """

    report: bool = True
    png: bool = False
    fail_on_slo: bool = False
    attainment: float = 0.9

    def write(self, console: Console, path: Path, runs: Sequence[Measured], *, title: str = "") -> None:
        """Write the summary, the report and the pictures into ``path``.

        Raises ValueError where pictures cannot be drawn.
        """
        (path / SUMMARY).write_bytes(_summaries(runs))
        # plotly's script is megabytes, and nobody else needs it
        from epd_serve.bench.report import write_pngs, write_report

        if self.report:
            try:
                write_report(path / REPORT, runs, title=title, share=self.attainment)
            except ValueError as error:
                console.print(f"no report: {error}", highlight=False, markup=False)
            else:
                console.print(f"report: {path / REPORT}", highlight=False, markup=False, soft_wrap=True)
        if self.png:
            paths = write_pngs(path / "png", runs, share=self.attainment)
            console.print(
                f"{len(paths)} pictures in {path / 'png'}", highlight=False, markup=False, soft_wrap=True
            )

    def exit_code(self, console: Console, runs: Sequence[Measured]) -> int:
        """0, or where --fail-on-slo is set and a run missed, :data:`SLO_MISSED`."""
        if not self.fail_on_slo:
            return 0
        misses = [sentence for run in runs if (sentence := missed(run, self.attainment))]
        for sentence in misses:
            console.print(sentence, style="red", highlight=False, markup=False, soft_wrap=True)
        return SLO_MISSED if misses else 0


def missed(run: Measured, attainment: float) -> str:
    """A sentence where fewer requests than ``attainment`` were good, else nothing."""
    share = run.summary.total.attainment
    if share.value >= attainment:
        return ""
    slo = run.settings.slo
    return (
        f"SLO missed: {run.label}, {run.workload_name}, {run.load_text}: {share.part} of {share.whole} requests "
        f"({share.value:.1%}) had TTFT ≤ {slo.ttft_ms:g} ms and TPOT ≤ {slo.tpot_ms:g} ms, not {attainment:.0%}"
    )


def measured(run: RunDirectory, summary: Summary) -> Measured:
    """A run with its records and samples, read from its directory."""
    return Measured(settings=run.settings, summary=summary, records=run.records(), samples=run.samples())


def write_run(run: RunDirectory, summary: Summary) -> Measured:
    """Write AISBench's files and result.json into the run's directory."""
    found = measured(run, summary)
    write_aisbench(run.path, found)
    (run.path / "result.json").write_bytes(msgspec.json.encode(vllm_result(found)) + b"\n")
    return found


def _summaries(runs: Sequence[Measured]) -> bytes:
    """A JSON array with one run a line: the figures of the whole run, in four digits."""
    lines = [
        msgspec.json.encode(
            {
                "label": run.label,
                "workload": run.workload_name,
                "rate": run.rate,
                "num_devices": run.settings.num_devices,
                "slo": run.settings.slo,
                "total": _short(msgspec.to_builtins(run.summary.total)),
            }
        )
        for run in runs
    ]
    return b"[\n" + b",\n".join(lines) + b"\n]\n"


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items()}
    return value


def slo_of(slo: SLO, ttft_ms: float | None, tpot_ms: float | None) -> SLO:
    """Return ``slo`` with the limits that are given in place of its own."""
    return SLO(
        ttft_ms=slo.ttft_ms if ttft_ms is None else ttft_ms, tpot_ms=slo.tpot_ms if tpot_ms is None else tpot_ms
    )


def read_runs(path: Path, ttft_ms: float | None = None, tpot_ms: float | None = None) -> list[Measured]:
    """All runs below a directory: of a run, a sweep or a comparison, in the order in which they were begun.

    Limits that are given stand for those of the runs. Raises ValueError where there is no run.
    """
    found = []
    for file in path.rglob("run.json"):
        run = RunDirectory.open(file.parent)
        run.settings.slo = slo_of(run.settings.slo, ttft_ms, tpot_ms)
        if records := run.records():
            summary = summarise(run.settings, records, run.schedule(), run.segments())
            found.append(measured(run, summary))
    if not found:
        raise ValueError(f"{path} holds no run with finished requests")
    return sorted(found, key=lambda one: one.settings.created_unix_s)
