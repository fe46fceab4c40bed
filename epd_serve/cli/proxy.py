"""``epd-serve proxy``: run only the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from epd_serve.cli.flags import Host, Port
from epd_serve.config import DeploymentConfig, load_config
from epd_serve.imports import uncollected
from epd_serve.launch.processes.ports import ports_each
from epd_serve.protocol.addresses import url_of


def proxy(
    config: Annotated[Path | None, typer.Option(help="Deployment file with a gateway section.")] = None,
    instance: Annotated[
        list[str] | None, typer.Option(metavar="NAME=URL", help="An instance; repeatable.")
    ] = None,
    host: Host = None,
    port: Port = None,
    reuse_port: Annotated[
        bool, typer.Option("--reuse-port", help="Share the port with other gateways that use this flag.")
    ] = False,
    listener: Annotated[int | None, typer.Option(help="Descriptor of a listening socket.", hidden=True)] = None,
    admin_path: Annotated[
        Path | None, typer.Option(help="Path of the admin API's Unix socket.", hidden=True)
    ] = None,
) -> None:
    """Run only the gateway, in front of instances started separately.

    The default instances are those of the deployment file's topology, from instances.base_port on.
    """
    deployment = load_config(config) if config else DeploymentConfig()

    instances = [_name_and_url(text) for text in instance or ()] or _instance_urls(deployment)
    names = [name for name, _ in instances]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"instance {', '.join(sorted(twice))} is given twice; names must differ")
    address = (host or deployment.gateway.host, deployment.gateway.port if port is None else port)
    with uncollected():
        from proxy.main import run_gateway

    code = run_gateway(
        deployment,
        instances,
        *address,
        config,
        reuse_port=reuse_port,
        listener=listener,
        admin_path=admin_path,
    )
    if code:
        raise typer.Exit(code)


def _name_and_url(text: str) -> tuple[str, str]:
    name, _, url = text.partition("=")
    if not name or not url.startswith(("http://", "https://")):
        raise ValueError(f"--instance {text}: write NAME=URL, as in e0=http://127.0.0.1:8100")
    return name, url.rstrip("/")


def _instance_urls(deployment: DeploymentConfig) -> list[tuple[str, str]]:
    """Return name and URL of each instance of a deployment with fixed ports."""
    if deployment.gateway.instances is not None:
        return list(deployment.gateway.instances.items())
    host, base, each = deployment.instances.host, deployment.instances.base_port, ports_each(deployment)
    if not base:
        raise ValueError(
            "instances.base_port is 0: set it in the file and for 'up', or add --instance NAME=URL for each, "
            "as in e0=http://127.0.0.1:8100"
        )
    tls = deployment.read_tls() is not None
    return [
        (one.name, url_of(host, base + index * each, tls=tls)) for index, one in enumerate(deployment.placement())
    ]
