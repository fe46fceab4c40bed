"""The interference matrix of a device: each workload alone, and each pair of a kind side by side."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from itertools import combinations_with_replacement
from pathlib import Path
from statistics import median

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from device.registry import get_device
from epd_serve.cost.interference import InterferenceMatrix, Isolation, Kind, Workload
from epd_serve.profiling.sides import Setting, Side
from epd_serve.profiling.workloads import WORKLOADS

#: Between the command and the common start of both sides.
_LEAD_S = 0.02
_ROUNDS = 3


def run_interference(
    device: str,
    *,
    isolation: Isolation,
    dtype: str,
    seconds: float,
    threads: int | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Print the matrix, and write ``out``.json and ``out``.png. Raises ValueError for what cannot be measured."""
    if out is not None:
        check_can_draw()
    with Console(stderr=True).status("measuring") as status:
        matrix = measure(
            device,
            isolation=isolation,
            dtype=dtype or ("float32" if device == "cpu" else "bfloat16"),
            seconds=seconds,
            threads=threads,
            progress=lambda text: status.update(f"measuring {text}"),
        )
    if out is not None:
        out.with_suffix(".json").write_bytes(matrix.to_json())
        draw_heat_map(matrix, out.with_suffix(".png"))
    if as_json:
        sys.stdout.write(matrix.to_json().decode())
    else:
        show(matrix, Console())


def measure(
    device_name: str,
    *,
    isolation: Isolation,
    dtype: str,
    seconds: float,
    threads: int | None = None,
    share: float | None = None,
    names: Sequence[str] | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> InterferenceMatrix:
    """Measure all pairs, or those of ``names``; takes about three times ``seconds`` for each.

    Its members run alone and side by side in turns: what drifts meanwhile (clocks, neighbours on the machine)
    changes both alike.

    Args:
        threads: number for each side on a CPU; None: half of the cores, what two instances get by default.
        share: of the device for each process; None: no limit.

    Raises ValueError for a device or a dtype that is not there.
    """
    device = get_device(device_name)
    possible = [str(known).removeprefix("torch.") for known in device.dtypes]
    if dtype not in possible:
        raise ValueError(f"dtype {dtype}: {device.name} computes in {', '.join(possible)}")
    if device.type == "cpu" and threads is None:
        threads = max(1, len(os.sched_getaffinity(0)) // 2)
    chosen = list(names or WORKLOADS)
    setting = Setting(device=device.name, dtype=dtype, threads=threads, share=share)
    alone: dict[str, list[float]] = {name: [] for name in chosen}
    increase: dict[tuple[str, str], float] = {}
    with ExitStack() as stack:
        sides = [stack.enter_context(closing(Side(setting, isolation))) for _ in range(2)]
        for first, second in _pairs(chosen):
            progress(f"{first} beside {second}")
            for side, name in zip(sides, (first, second), strict=True):
                side.prepare(name).result()
            base: list[list[float]] = [[], []]
            beside: list[list[float]] = [[], []]
            for _ in range(_ROUNDS):
                for side, times in zip(sides, base, strict=True):
                    times += _together([side], seconds / _ROUNDS)[0]
                for times, more in zip(beside, _together(sides, seconds / _ROUNDS), strict=True):
                    times += more
            for i, (name, other) in enumerate(((first, second), (second, first))):
                alone[name].append(_typical(base[i]))
                ratio = _typical(beside[i]) / _typical(base[i])
                increase[name, other] = (increase.get((name, other), ratio - 1) + ratio - 1) / 2
    return InterferenceMatrix(
        device=device.name,
        description=f"{device.description}, {device.cores} cores",
        isolation=isolation,
        dtype=dtype,
        threads=threads,
        seconds=seconds,
        workloads=[
            Workload(
                name=name,
                kind=WORKLOADS[name].kind,
                demand=WORKLOADS[name].demand,
                alone_s=median(alone[name]),
                alone_spread=max(alone[name]) / min(alone[name]) - 1,
            )
            for name in chosen
        ],
        increase=[[increase.get((of, beside)) for beside in chosen] for of in chosen],
    ).with_findings()


def _pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """All pairs of workloads of one kind, each beside itself too: two instances of a stage may share a device."""
    return [
        (first, second)
        for first, second in combinations_with_replacement(names, 2)
        if WORKLOADS[first].kind == WORKLOADS[second].kind
    ]


def _together(sides: Sequence[Side], seconds: float) -> list[list[float]]:
    """The seconds of each side's calls while all of ``sides`` run."""
    start = time.monotonic() + _LEAD_S
    runs = [side.run(start, start + seconds) for side in sides]
    return [run.result() for run in runs]


def _typical(times: Sequence[float]) -> float:
    """The lower quartile: others on the machine make calls longer and never shorter."""
    return sorted(times)[len(times) // 4]


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
    figure.suptitle(f"{matrix.description}: {matrix.isolation} isolation, {matrix.dtype}", fontsize=10)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:+.0%}"
