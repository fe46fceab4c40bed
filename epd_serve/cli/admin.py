"""Find the deployment of a command, and call its admin API."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from epd_serve.config.keys import ADMIN_KEY, admin_headers
from epd_serve.protocol.addresses import url_of
from epd_serve.rpc.admin import AdminClient, AdminRefused, AdminUnreachable

Deployment = Annotated[
    str | None,
    typer.Option(
        "--deployment", metavar="HOST:PORT", help="Address or port of its gateway, or its deployment file."
    ),
]
AdminUrl = Annotated[
    str | None,
    typer.Option("--admin", metavar="URL", help="Admin API of a gateway elsewhere: gateway.admin in its file."),
]


def choose_gateway(deployment: str | None, url: str | None) -> tuple[str, AdminClient]:
    """Return the name and admin API of a gateway: at ``url``, or of this user's deployment on this machine.

    Raises ValueError if there is none or more than one.
    """
    from epd_serve.launch.processes.runs import find_run

    if url is None:
        run = find_run(deployment)
        return run.address, AdminClient(run.admin)
    if deployment is not None:
        raise ValueError("--deployment is for this machine and --admin for another one; use one of them")
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"--admin {url} is not a URL; write --admin http://{url}")
    return url, AdminClient(url, admin_headers())


def server_url(base_url: str, deployment: str | None) -> str:
    """Return ``base_url`` without /v1, else the URL of this machine's running deployment, else the default URL."""
    from epd_serve.launch.processes.runs import find_run, running

    if base_url:
        if deployment is not None:
            raise ValueError("--deployment is for this machine and --base-url for any server; use one of them")
        return base_url.rstrip("/").removesuffix("/v1")
    if deployment is None and not running():
        return "http://127.0.0.1:8000"
    host, _, port = find_run(deployment).address.rpartition(":")
    return url_of(host, int(port))


def ask_admin(
    gateway: AdminClient, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = 30.0
) -> Any:
    """Return the JSON of an admin API's answer. Raises ValueError if it refuses or is unreachable."""
    try:
        return asyncio.run(gateway.ask(method, path, body, timeout_s))
    except AdminRefused as refusal:
        hint = f"; its key is read from {ADMIN_KEY}" if refusal.status == 401 else ""
        if refusal.status in (404, 405) and refusal.code is None:
            hint = f"; {gateway.where} is not an admin API: use gateway.admin.port"
        raise ValueError(f"{refusal}{hint}") from refusal
    except TimeoutError as error:
        raise ValueError(f"{gateway.where} has not answered in {timeout_s:g} s") from error
    except AdminUnreachable as error:
        raise ValueError(f"{error}; the gateway may be starting, or lack gateway.admin.port") from error
