"""``epd-serve autoscale``: fits a running deployment to its load."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Annotated

import typer

from epd_serve.cli.flags import ParentPid, tie_to
from epd_serve.config import load_config
from epd_serve.config.keys import admin_headers
from epd_serve.rpc.admin import AdminClient


def autoscale(
    file: Annotated[Path, typer.Argument(help="Deployment file; its sections slo and elastic are used.")],
    admin: Annotated[
        str | None, typer.Option(metavar="URL", help="Admin API of a gateway that 'epd-serve proxy' started.")
    ] = None,
    socket: Annotated[Path | None, typer.Option(help="Socket of the gateway's admin API.", hidden=True)] = None,
    parent_pid: ParentPid = None,
) -> None:
    """Switch roles of instances by load, and log when the load has drifted from what was planned for.

    'epd-serve up' starts it where the deployment file has the section elastic. The key of the admin API
    is read from EPD_SERVE_ADMIN_KEY.
    """
    tie_to(parent_pid)
    from epd_serve.autoscale.role_loop import autoscale as run

    config = load_config(file)
    if config.elastic is None:
        raise ValueError(f"{file} has no section elastic; write elastic: {{}}")
    if admin is None and socket is None:
        raise ValueError("say which deployment: --admin with the URL of its gateway's admin API")
    logging.basicConfig(format="%(asctime)s autoscale %(levelname)s %(message)s", level=logging.INFO)
    client = AdminClient(socket) if socket is not None else AdminClient(admin or "", admin_headers())
    asyncio.run(run(config, client))
