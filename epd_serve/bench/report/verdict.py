"""One sentence on each deployment: up to which load it holds the limits, which of them breaks first, and why."""

from __future__ import annotations

from collections.abc import Sequence

from epd_serve.bench.report.series import Grid, grids
from epd_serve.bench.report.timeline import stage_means
from epd_serve.bench.summary import Measured
from epd_serve.bench.types import WindowSummary

#: What lacks where a stage's time grows most before the first token.
_LACKS = {
    "queue": "a place at the gateway",
    "encode": "encode",
    "prefill": "prefill",
    "kv_transfer": "room at decode, or a faster link",
}


def verdicts(runs: Sequence[Measured], share: float) -> list[str]:
    """A sentence for each workload and deployment, in the order in which they were measured."""
    found = grids(runs, share)
    return [
        (f"{grid.workload}: " if len(found) > 1 else "") + verdict(grid, label)
        for grid in found
        for label in grid.labels
    ]


def verdict(grid: Grid, label: str) -> str:
    """The sentence of one deployment; a load counts as held where ``grid.share`` of the requests were good."""
    runs = grid.of(label)
    held: tuple[float, Measured] | None = None
    for load, run in runs:
        if run.total.attainment.value < grid.share:
            return _broken(grid, label, held, (load, run))
        held = load, run
    assert held is not None, "a grid has a run for each label"
    total = held[1].total
    most = "" if len(runs) == 1 else ", the highest that was tried"
    return (
        f"{label} holds the limits at {held[0]:.4g} {grid.unit}{most}: {100 * total.attainment.value:.0f} % of "
        f"the requests were good{_doubt(grid, total)}."
    )


def _broken(grid: Grid, label: str, held: tuple[float, Measured] | None, broken: tuple[float, Measured]) -> str:
    load, run = broken
    first = _first_to_break(run, None if held is None else held[1], grid.share)
    good = f"{100 * run.total.attainment.value:.0f} % of the requests were good{_doubt(grid, run.total)}"
    if held is None:
        least = "" if len(grid.of(label)) == 1 else ", the lowest load that was tried"
        return f"{label} breaks the limits at {load:.4g} {grid.unit}{least}: {good}; what breaks is {first}."
    doubt = _doubt(grid, held[1].total)
    return (
        f"{label} holds the limits up to {held[0]:.4g} {grid.unit}{doubt}; first to break, at {load:.4g}, is "
        f"{first}: {good}."
    )


def _first_to_break(run: Measured, held: Measured | None, share: float) -> str:
    total = run.total
    if total.num_failed and total.num_failed / total.num_requests > 1 - share:
        kind = max(total.failures, key=lambda name: total.failures[name])
        return f"the answer itself ({total.num_failed} of {total.num_requests} requests failed: {kind})"
    has_stages = any(record.stages for record in run.records)
    if total.tpot_attainment.value < total.ttft_attainment.value:
        return "TPOT, for want of decode" if has_stages else "TPOT"
    if not has_stages:
        return "TTFT"
    before = {} if held is None else stage_means(held.records)
    now = stage_means(run.records)
    lacking = max(_LACKS, key=lambda stage: now.get(stage, 0.0) - before.get(stage, 0.0))
    return f"TTFT, for want of {_LACKS[lacking]}"


def _doubt(grid: Grid, total: WindowSummary) -> str:
    """Words where the interval of the share has the wanted one inside: chance may decide."""
    one = total.attainment
    if not one.low < grid.share <= one.high:
        return ""
    return f" ({100 * one.low:.0f} to {100 * one.high:.0f} % with {one.whole} requests: too few to be sure)"
