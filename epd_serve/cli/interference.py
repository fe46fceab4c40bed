"""``epd-serve interference``: what is typed and what it means."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from epd_serve.cost.interference import Isolation
from epd_serve.errors import needs_native


def interference(
    device: Annotated[str, typer.Option(help="cpu, cuda:0, npu:0 ...")] = "cpu",
    isolation: Annotated[
        Isolation, typer.Option(help="Side by side as processes, or as streams of one process.")
    ] = "process",
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16 or float16; by default what suits the device.")
    ] = "",
    seconds: Annotated[
        float, typer.Option(min=0.05, help="Length of each measurement; there are 3 a pair.")
    ] = 1.0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads of each side; by default half of the cores.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the matrix to OUT.json, its heat map to OUT.png.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the matrix as JSON instead of tables.")] = False,
) -> None:
    """Measure how much operators and stages slow each other down on one device (EPD-Serve, figure 6)."""
    with needs_native():
        from epd_serve.profiling.interference import run_interference
    run_interference(
        device,
        isolation=isolation,
        dtype=dtype,
        seconds=seconds,
        threads=threads,
        out=out,
        as_json=as_json,
    )
