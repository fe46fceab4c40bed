"""``epd-serve autoscale``: adapt a running deployment to its load."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Annotated

import typer

from epd_serve.config import load_config
from epd_serve.config.keys import admin_headers
from epd_serve.rpc.admin import AdminClient


def autoscale(
    file: Annotated[Path, typer.Argument(help="Deployment file with the sections slo and elastic.")],
    admin: Annotated[
        str | None, typer.Option(metavar="URL", help="Admin API of a gateway started by 'epd-serve proxy'.")
    ] = None,
    socket: Annotated[Path | None, typer.Option(help="Socket of the gateway's admin API.", hidden=True)] = None,
) -> None:
    """Switch roles of instances by load, and log when the load drifts from the plan.

    'epd-serve up' starts it if the deployment file has the section elastic. EPD_SERVE_ADMIN_KEY holds the key of
    the admin API.
    """
    from epd_serve.autoscale.role_loop import autoscale as run

    config = load_config(file)
    if config.elastic is None:
        raise ValueError(f"{file} lacks the section elastic; write elastic: {{}}")
    if admin is None and socket is None:
        raise ValueError("--admin is missing: give the URL of the gateway's admin API")
    logging.basicConfig(format="%(asctime)s autoscale %(levelname)s %(message)s", level=logging.INFO)
    client = AdminClient(socket) if socket is not None else AdminClient(admin or "", admin_headers())
    asyncio.run(run(config, client))
