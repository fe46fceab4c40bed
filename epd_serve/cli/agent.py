"""``epd-serve agent``: the instances of a deployment in one place."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from epd_serve.cli.flags import Join
from epd_serve.cli.interrupt import ended_by_ctrl_c
from epd_serve.config import load_config


def agent(
    file: Annotated[Path, typer.Argument(help="Deployment file, the same everywhere.")],
    unit: Annotated[
        int, typer.Option(min=0, help="Run one replica of this unit of the topology; 0 is the first.")
    ],
    name: Annotated[str, typer.Option(help="Of its instance at the gateway; of several, what theirs begin with.")],
    join: Join = None,
    host: Annotated[str, typer.Option(help="Address that its instances listen on.")] = "127.0.0.1",
    health_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of /health/live and /health/ready.")
    ] = None,
    dry: Annotated[
        bool, typer.Option("--dry-run", help="Print every command line and its environment; start nothing.")
    ] = False,
) -> None:
    """Run one place's instances of a deployment: start them, join the gateways, start again what ends."""
    config = load_config(file)
    with ended_by_ctrl_c():
        from epd_serve.launch.remote.agent import run_agent
        from epd_serve.launch.remote.part import unit_part

        if not dry and isinstance(config.model, str):
            from epd_serve.launch.download import download

            download(config.model)
        part = unit_part(config, unit, name)
    if dry:
        from epd_serve.launch.dry_run import process_lines
        from epd_serve.launch.remote.part import part_specs

        with TemporaryDirectory() as directory:
            for line in process_lines(part_specs(part, host, os.environ, Path(directory)), os.environ):
                typer.echo(line)
        return
    code = asyncio.run(run_agent(part, host=host, gateways=join or (), health_port=health_port))
    raise typer.Exit(code)
