"""An interference matrix as a table and as the heat map of EPD-Serve's figure 6."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from epd_serve.cost.interference import InterferenceMatrix, Kind

_TITLES: dict[Kind, str] = {"operator": "operators", "stage": "stages"}


def show(matrix: InterferenceMatrix, console: Console) -> None:
    """Print a table for operators and one for stages, and what follows from them."""
    for kind, title in _TITLES.items():
        chosen = [(i, w) for i, w in enumerate(matrix.workloads) if w.kind == kind]
        if not chosen:
            continue
        table = Table(
            title=f"Latency increase of {title}: of the row, beside the column", title_justify="left", box=SIMPLE
        )
        table.add_column("")
        for heading in ("alone", *(workload.name for _, workload in chosen)):
            table.add_column(heading, justify="right")
        for i, workload in chosen:
            table.add_row(
                f"{workload.name}: {workload.demand}",
                f"{1000 * workload.alone_s:.1f} ms ±{workload.alone_spread / 2:.0%}",
                *(_percent(matrix.increase[i][j]) for j, _ in chosen),
            )
        console.print(table)
    for finding in matrix.findings:
        console.print(finding)
    for name, reason in matrix.skipped.items():
        console.print(f"not measured: {name}: {reason}")


def check_can_draw() -> None:
    """Raises ValueError that says what to install."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("the heat map needs matplotlib: pip install matplotlib, or leave --out away")


def draw_heat_map(matrix: InterferenceMatrix, path: Path) -> None:
    """Write one panel for operators and one for stages as PNG. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")  # a file only; no screen is needed
    import matplotlib.pyplot as plt

    kinds = [kind for kind in _TITLES if any(w.kind == kind for w in matrix.workloads)]
    counts = [sum(w.kind == kind for w in matrix.workloads) for kind in kinds]
    figure, axes = plt.subplots(
        1,
        len(kinds),
        figsize=(2 + 1.15 * sum(counts), 1.6 + 0.75 * max(counts)),
        width_ratios=counts,
        squeeze=False,
    )
    for axis, kind in zip(axes[0], kinds, strict=True):
        chosen = [(i, w) for i, w in enumerate(matrix.workloads) if w.kind == kind]
        values = [[100 * (matrix.increase[i][j] or 0.0) for j, _ in chosen] for i, _ in chosen]
        axis.imshow(values, cmap="YlOrRd", vmin=0, vmax=100)
        names = [f"{w.name}\n({w.demand})" for _, w in chosen]
        axis.set_xticks(range(len(chosen)), names, rotation=35, ha="right", fontsize=8)
        axis.set_yticks(range(len(chosen)), names, fontsize=8)
        for row, line in enumerate(values):
            for column, value in enumerate(line):
                colour = "white" if value > 70 else "black"
                axis.text(column, row, f"{value:+.0f} %", ha="center", va="center", color=colour, fontsize=9)
        axis.set_title(f"{_TITLES[kind]}: latency increase of the row\nbeside the column", fontsize=9)
    figure.suptitle(
        f"{matrix.description}: {matrix.isolation} isolation, {matrix.dtype}, {matrix.clock} time", fontsize=10
    )
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:+.0%}"
