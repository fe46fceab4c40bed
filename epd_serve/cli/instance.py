"""``epd-serve instance``: one instance."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from epd_serve.cli import ended_by_ctrl_c
from epd_serve.cli.flags import model_of
from epd_serve.config import DeploymentConfig, InstanceOptions, change_config, load_config
from epd_serve.errors import needs_native
from epd_serve.imports import uncollected
from epd_serve.protocol.addresses import server_of
from epd_serve.types import Role


def instance(
    name: Annotated[str | None, typer.Option(help="Unique in the deployment, as in e0.")] = None,
    role: Annotated[str | None, typer.Option(help="Stages of the instance: E, P, D, EP, ED, PD or EPD.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Override the file's: 'demo' or a transformers model directory.")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address of the control server; overrides the file's instances.host.")
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8100,
    device: Annotated[
        str, typer.Option(help="cpu, cuda:0 ...; several, as in cuda:0,cuda:1, are tensor-parallel.")
    ] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; overrides the file's.")] = None,
    advertise: Annotated[
        str | None,
        typer.Option(help="Address for peers, if it differs from --host, as behind NAT."),
    ] = None,
    data_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port for KV and features over TCP; 0: a free one.")
    ] = 0,
    join: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="Admin plane of a gateway to join, repeatable; a host name means all its addresses. "
            "Key: EPD_SERVE_CLUSTER_KEY or EPD_SERVE_ADMIN_KEY.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Deployment file with all other options of its role; default: default options."),
    ] = None,
    unit: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Instead of --role: run all instances of one replica of this unit of the file's topology, 0 for "
            "the first, and restart those that end. With several instances, --name is their common prefix.",
        ),
    ] = None,
    replica: Annotated[
        int | None,
        typer.Option(
            min=0, help="With --unit, instead of --name: use the names of this replica in the deployment."
        ),
    ] = None,
    health_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="With --unit: port of /health/live and /health/ready."),
    ] = None,
    options: Annotated[str | None, typer.Option(help="All options as JSON.", hidden=True)] = None,
) -> None:
    """Run one instance, or with --unit all that share a device, as 'epd-serve up' does."""
    for url in join or ():
        server_of(url)
    if unit is not None:
        if config is None or (name is None) == (replica is None):
            raise ValueError("--unit needs --config FILE, and --name or --replica, as in --unit 0 --name e-1")
        deployment, address = load_config(config), host or "127.0.0.1"
        with ended_by_ctrl_c():
            from epd_serve.launch.download import download
            from epd_serve.launch.remote.unit import run_unit, unit_placement

            if isinstance(deployment.model, str):
                download(deployment.model)
            here = unit_placement(deployment, unit, name, replica or 0)
        running = run_unit(deployment, here, address=address, gateways=join or [], health_port=health_port)
        raise typer.Exit(asyncio.run(running))
    if options is not None:
        chosen = InstanceOptions.model_validate_json(options)
    elif name is None or role is None:
        raise ValueError("an instance needs --name and --role, as in --name e0 --role E")
    else:
        deployment = load_config(config) if config else DeploymentConfig()
        if model is not None:
            deployment = change_config(deployment, {"model": model_of(model)})
        chosen = deployment.options_alone(
            name,
            Role.parse(role),
            host=host,
            port=port,
            device=device,
            threads=threads,
            join=join or (),
            advertise=advertise,
            data_port=data_port,
        )
    with needs_native():
        with uncollected():
            from epd_serve.instance.main import end_process, run_instance

        run_instance(chosen)
    end_process()
