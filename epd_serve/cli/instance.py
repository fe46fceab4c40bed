"""``epd-serve instance``: one instance."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from epd_serve.cli.flags import Join, ParentPid, model_of, tie_to
from epd_serve.config import DeploymentConfig, InstanceOptions, change_config, load_config
from epd_serve.errors import needs_native
from epd_serve.types import Role


def instance(
    name: Annotated[str | None, typer.Option(help="Unique in the deployment, as in e0.")] = None,
    role: Annotated[str | None, typer.Option(help="Stages of the instance: E, P, D, EP, ED, PD or EPD.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Over the file's: 'demo' or a transformers model directory.")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address of the control server; over the file's instances.host.")
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8100,
    device: Annotated[
        str, typer.Option(help="cpu, cuda:0 ...; several, as in cuda:0,cuda:1, are tensor-parallel.")
    ] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; over the file's.")] = None,
    advertise: Annotated[
        str | None,
        typer.Option(help="Address under which others reach it, where that is not --host, as behind NAT."),
    ] = None,
    data_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port for KV and features over TCP; 0: a free one.")
    ] = 0,
    join: Join = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Deployment file with all other options of its role. Without one: defaults."),
    ] = None,
    options: Annotated[str | None, typer.Option(help="All options as JSON.", hidden=True)] = None,
    parent_pid: ParentPid = None,
) -> None:
    """Run one instance; 'epd-serve up' starts these."""
    tie_to(parent_pid)
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
        from epd_serve.instance.main import end_process, run_instance

        run_instance(chosen)
    end_process()
