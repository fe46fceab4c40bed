"""``epd-serve up``: a deployment on this machine or on a Ray cluster."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from epd_serve.cli import ended_by_ctrl_c
from epd_serve.cli.flags import Host, On, Port, model_of, ray_address
from epd_serve.config import DeploymentConfig, change_config, load_config
from epd_serve.imports import uncollected


def up(
    file: Annotated[
        Path | None, typer.Argument(help="Deployment file; without one: the demo model as E-P-D on the CPU.")
    ] = None,
    host: Host = None,
    port: Port = None,
    topology: Annotated[str | None, typer.Option(help="Over the file's, as in '(E-P)-D'.")] = None,
    base_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port of the first instance; the others follow. 0: free ones."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Over the file's: 'demo', a model's directory, or its name on the hub.")
    ] = None,
    dry: Annotated[
        bool, typer.Option("--dry-run", help="Print every command line and its environment; start nothing.")
    ] = False,
    on: On | None = None,
    spread: Annotated[
        Literal["pack", "host"],
        typer.Option(help="With --on: device groups on few hosts, or on as many as there are."),
    ] = "pack",
) -> None:
    """Start a deployment on this machine and stay until Ctrl-C; with --on, start it on a cluster."""
    gateway = {key: value for key, value in (("host", host), ("port", port)) if value is not None}
    changes: dict[str, Any] = {"gateway": gateway} if gateway else {}
    if base_port is not None:
        changes["instances"] = {"base_port": base_port}
    if topology is not None:
        changes["topology"] = topology
    if model is not None:
        changes["model"] = model_of(model)
    config = change_config(load_config(file) if file else DeploymentConfig(), changes)
    if on is not None:
        if dry:
            raise ValueError("--dry-run shows the processes of this machine; leave it out with --on")
        with ended_by_ctrl_c():
            from epd_serve.launch.remote import ray

        typer.echo(ray.up(config, file.stem if file else "epd-serve", ray_address(on), spread))
        return
    if not dry:
        from epd_serve.launch.download import download

        if isinstance(config.model, str):
            download(config.model)
    with ended_by_ctrl_c(), uncollected():
        from epd_serve.launch.choices import choose_all

        config, reasons = choose_all(config)
        if not dry:
            from epd_serve.launch.processes.forking import preload

            preload(config)  # it imports for seconds, while this process looks for faults
        if config.engine == "native" or not dry:  # vLLM's command lines may be for another machine
            from epd_serve.launch.preflight import check_deployment

            check_deployment(config, os.environ)
    if dry:
        from epd_serve.launch.dry_run import dry_run

        for line in (*(f"# {reason}" for reason in reasons), *dry_run(config, file, os.environ)):
            typer.echo(line)
        return
    with ended_by_ctrl_c(), uncollected():
        from epd_serve.launch.up import Terminal, run_up
    raise typer.Exit(asyncio.run(run_up(config, Terminal(), reasons, file)))
