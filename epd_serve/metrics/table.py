"""The latency breakdown as people read it."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from epd_serve.metrics.timeline import STAGES

_LABELS = {
    **{stage: stage.replace("_", " ").replace("ep ", "E-P ").replace("pd ", "P-D ") for stage in STAGES},
    "stages": "all stages",
    "gateway": "gateway, before them",
    "between": "calls and answer",
    "e2e": "end to end",
}


def breakdown_table(figures: dict[str, Any]) -> Table:
    """A table of the figures that :func:`epd_serve.metrics.breakdown.summary` returns."""
    table = Table(title=f"Mean of {figures['num_requests']} requests")
    table.add_column("stage")
    for heading in ("mean ms", "p50 ms", "p95 ms", "share"):
        table.add_column(heading, justify="right")
    for name, row in figures["rows"].items():
        if name in ("stages", "e2e"):
            table.add_section()
        times = [f"{row[key]:.2f}" for key in ("mean_ms", "p50_ms", "p95_ms")]
        table.add_row(_LABELS[name], *times, f"{row['share']:.1%}")
    return table
