"""The plots of a report, by name and in the order in which they are read."""

from __future__ import annotations

from collections.abc import Iterator

from epd_serve.bench.report import distributions, rates, topologies
from epd_serve.bench.report.series import Grid
from epd_serve.bench.report.theme import Figure

#: Those that two fit into a row.
HALF = frozenset({"capacity", "attainment-map", "attainment", "answered"})


def plots(grid: Grid) -> dict[str, Figure]:
    """The plots of one workload, by name, without those that compare loads or deployments where there is one."""
    return {name: figure for name, figure in _plots(grid) if figure is not None}


def _plots(grid: Grid) -> Iterator[tuple[str, Figure | None]]:
    several_loads, several_labels = len(grid.loads) > 1, len(grid.labels) > 1
    if several_loads and several_labels:
        yield "capacity", rates.capacity(grid)
        yield "attainment-map", rates.attainment_map(grid)
    yield "attainment", rates.attainment(grid)
    if several_loads:
        yield "answered", rates.keeps_up(grid)
        yield "throughput", rates.throughput(grid)
        yield "latency", rates.latency(grid)
    yield "limits", distributions.corners(grid)
    if several_labels:
        yield "strengths", topologies.radar(grid)
    if several_labels and several_loads:
        yield "places", topologies.ranks(grid)
    if several_labels or several_loads:
        yield "ttft", distributions.strips(grid, "ttft")
        yield "tpot", distributions.strips(grid, "tpot")
    yield "waiting", distributions.cumulative(grid)
    yield "stages", topologies.stages(grid)
