"""``epd-serve interference``: measure, write, show."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from epd_serve.colocation.measure import measure
from epd_serve.colocation.report import check_can_draw, draw_heat_map, show
from epd_serve.cost.interference import Clock, Isolation


def run_interference(
    device: str,
    *,
    isolation: Isolation,
    dtype: str,
    seconds: float,
    threads: int | None,
    clock: Clock,
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
            clock=clock,
            progress=lambda text: status.update(f"measuring {text}"),
        )
    if out is not None:
        out.with_suffix(".json").write_bytes(matrix.to_json())
        draw_heat_map(matrix, out.with_suffix(".png"))
    if as_json:
        sys.stdout.write(matrix.to_json().decode())
    else:
        show(matrix, Console())
