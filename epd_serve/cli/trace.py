"""``epd-serve trace``: break down the time of a deployment's requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from epd_serve.cli.flags import writable


def trace(
    directory: Annotated[Path, typer.Argument(help="Directory named by 'trace' in the deployment file.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Write everything to one file for ui.perfetto.dev.", callback=writable
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Join the traces of a deployment and break down the time of its requests."""
    from epd_serve.telemetry.breakdown import breakdown_table, read_traces, summary

    joined = read_traces(directory)
    if output is not None:
        output.write_bytes(joined.to_json())
    figures = summary(joined.requests)
    if as_json:
        typer.echo(json.dumps(figures, indent=2))
    else:
        Console().print(breakdown_table(figures))
