"""``epd-serve agent``: the instances of a deployment in one place."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from epd_serve.cli import ended_by_ctrl_c
from epd_serve.cli.flags import Join
from epd_serve.config import load_config


def agent(
    file: Annotated[Path, typer.Argument(help="Deployment file, the same everywhere.")],
    host_name: Annotated[str | None, typer.Option(help="Run the instances on this host of the file.")] = None,
    unit: Annotated[
        int | None,
        typer.Option(min=0, help="Run one replica of this unit of the topology, 0 for the first."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Of the unit's instance at the gateway; of several, what theirs begin with.")
    ] = None,
    replica: Annotated[
        int | None,
        typer.Option(min=0, help="Instead of --name: the replica whose names in the deployment they have."),
    ] = None,
    join: Join = None,
    host: Annotated[
        str | None, typer.Option(help="Address that the instances listen on; over the file's, else 127.0.0.1.")
    ] = None,
    health_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="Port of /health/live and /health/ready, with --unit; of a host it is the one "
            "before instances.base_port.",
        ),
    ] = None,
    dry: Annotated[
        bool, typer.Option("--dry-run", help="Print every command line and its environment; start nothing.")
    ] = False,
) -> None:
    """Run one place's instances of a deployment: start them, join the gateways, start again what ends.

    With --host-name the place follows the file of the gateway that is named first: it starts, switches and stops
    instances when that file changes.
    """
    config = load_config(file)
    if (host_name is None) == (unit is None) or (unit is not None and (name is None) == (replica is None)):
        raise ValueError("say which instances: --host-name n1, or --unit 0 with --name e-1 or with --replica 0")
    if host_name is not None and health_port is not None:
        raise ValueError("--health-port is for --unit; a host's agent has the port before instances.base_port")
    if host_name is not None and not join and not dry:
        raise ValueError("say where the gateway is: --join http://10.0.0.1:8001, with its gateway.admin.port")
    with ended_by_ctrl_c():
        from epd_serve.launch.remote.agent import run_agent
        from epd_serve.launch.remote.part import PartRecord, host_placement, unit_placement

        if not dry and isinstance(config.model, str):
            from epd_serve.launch.download import download

            download(config.model)
        port = health_port
        if unit is not None:
            place = partial(unit_placement, unit=unit, name=name, replica=replica or 0)
            address = host or "127.0.0.1"
        else:
            assert host_name is not None
            place = partial(host_placement, host=host_name)
            place(config)  # before the address of a host that the file lacks
            address, port = host or config.hosts[host_name].address, config.agent_port
    if dry:
        from epd_serve.launch.dry_run import process_lines

        with TemporaryDirectory() as directory:
            specs = PartRecord.of(config, place, address, os.environ, Path(directory)).begin()
            for line in process_lines(specs, os.environ):
                typer.echo(line)
        return
    code = asyncio.run(run_agent(config, place, address=address, gateways=join or (), port=port, host=host_name))
    raise typer.Exit(code)
