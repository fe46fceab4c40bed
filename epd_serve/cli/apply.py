"""``epd-serve apply``: another deployment file for what runs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from epd_serve.cli.admin import Deployment
from epd_serve.config import DeploymentConfig, load_config


def apply(
    file: Annotated[
        Path | None, typer.Argument(help="The new deployment file; without one: what runs, with --topology.")
    ] = None,
    deployment: Deployment = None,
    topology: Annotated[str | None, typer.Option(help="Over the file's, as in '2E-P-D'.")] = None,
    topology_only: Annotated[
        bool, typer.Option("--topology-only", help="Of the file, take topology and devices alone.")
    ] = False,
    dry: Annotated[bool, typer.Option("--dry-run", help="Print the steps and take none.")] = False,
    deadline: Annotated[float, typer.Option(min=0.001, max=3600, help="Seconds for each step.")] = 300.0,
    patience: Annotated[
        float,
        typer.Option(min=0, max=3600, help="Seconds for which running answers may end there; then others go on."),
    ] = 1.0,
) -> None:
    """Change a running deployment to another file, without a failed request.

    The deployment is one of 'epd-serve up' of the same user on this machine. Its instances are switched to other
    roles where that is possible; the rest is started, and then what is left over is drained and stopped. A step
    that fails ends it; the deployment serves on, and another apply goes on from there.
    """
    from epd_serve.launch.control import ApplyRequest, ask_launcher
    from epd_serve.launch.layout_choice import choose_layout
    from epd_serve.launch.processes.runtime import find_deployment

    if file is None and topology is None:
        raise ValueError("say what to apply: a deployment file, or --topology")
    config = None if file is None else choose_layout(load_config(file)).config
    address, directory = find_deployment(deployment, (config or DeploymentConfig()).gateway.port)
    steps: list[str] = []

    def say(text: str) -> None:
        steps.append(text)
        typer.echo(text)

    request = ApplyRequest(
        config=None if config is None else config.model_dump(mode="json", exclude_unset=True),
        topology_only=topology_only,
        changes={} if topology is None else {"topology": topology},
        dry_run=dry,
        deadline_s=deadline,
        patience_s=patience,
    )
    asyncio.run(ask_launcher(directory.control, request, say))
    if all(text.startswith(("note: ", "option ")) for text in steps):
        typer.echo("no instance has to change")
    if not dry:
        typer.echo(f"the deployment at {address} is what was asked for")
