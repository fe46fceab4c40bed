"""``epd-serve apply``: change a running deployment."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from epd_serve.cli.admin import Deployment
from epd_serve.config import DeploymentConfig, load_config


def apply(
    file: Annotated[
        Path | None, typer.Argument(help="The new deployment file; default: the running one, with --topology.")
    ] = None,
    deployment: Deployment = None,
    topology: Annotated[str | None, typer.Option(help="Override the file's, as in '2E-P-D'.")] = None,
    dry: Annotated[
        bool, typer.Option("--dry-run", help="Print the changed options and the steps, and change nothing.")
    ] = False,
) -> None:
    """Change a running deployment to another file without failing requests.

    The deployment was started by 'epd-serve up' of the same user on this machine. Instances are started, switched
    to other roles, then drained and stopped; a change of the gateway's options starts another gateway on its port.
    If a step fails, apply stops; the deployment keeps serving, and another apply continues from there.
    """
    from epd_serve.launch.apply import ask_apply
    from epd_serve.launch.choices import choose_layout
    from epd_serve.launch.processes.runs import find_run

    if file is None and topology is None:
        raise ValueError("nothing to apply: give a deployment file, or --topology")
    config = None if file is None else choose_layout(load_config(file))[0]
    run = find_run(deployment, (config or DeploymentConfig()).gateway.port)
    request = {
        "config": None if config is None else config.model_dump(mode="json", exclude_unset=True),
        "changes": {} if topology is None else {"topology": topology},
        "dry_run": dry,
    }
    asyncio.run(ask_apply(run.control, request, typer.echo))
    if not dry:
        typer.echo(f"the deployment at {run.address} is up to date")
