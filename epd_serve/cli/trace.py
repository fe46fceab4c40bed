"""``epd-serve trace``: where the time of a deployment's requests went."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def trace(
    directory: Annotated[Path, typer.Argument(help="What the deployment file calls trace.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write all of it as one file for ui.perfetto.dev.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Join the traces of a deployment and say where the time of its requests went."""
    from epd_serve.telemetry.breakdown import breakdown_table, read_traces, summary

    joined = read_traces(directory)
    if output is not None:
        output.write_bytes(joined.to_json())
    figures = summary(joined.requests)
    if as_json:
        typer.echo(json.dumps(figures, indent=2))
    else:
        Console().print(breakdown_table(figures))
