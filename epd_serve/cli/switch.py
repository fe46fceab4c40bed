"""``epd-serve switch``: switch a running instance to another role."""

from __future__ import annotations

from typing import Annotated

import typer

from epd_serve.cli.admin import AdminUrl, Deployment, ask_admin, choose_gateway
from epd_serve.types import Role

_MARGIN_S = 130.0


def switch(
    instance: Annotated[str, typer.Argument(help="Name of the instance, as in p0.")],
    role: Annotated[str, typer.Argument(help="E, P, D, EP, ED, PD or EPD; its current role cancels a switch.")],
    deployment: Deployment = None,
    admin: AdminUrl = None,
    deadline: Annotated[
        float, typer.Option(min=0.001, help="Seconds after which it returns to its old role.")
    ] = 30.0,
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds for running answers to finish there before others continue them.")
    ] = 1.0,
) -> None:
    """Switch a running instance to another role, and wait for it.

    The default deployment is this machine's. With --admin, EPD_SERVE_ADMIN_KEY holds the gateway's admin key.
    """
    body = {"role": str(Role.parse(role)), "deadline_s": deadline, "patience_s": patience}
    _, gateway = choose_gateway(deployment, admin)
    changed = ask_admin(gateway, "POST", f"/instances/{instance}/role", body, deadline + _MARGIN_S)
    if changed["from"] == changed["to"]:
        typer.echo(f"{instance} serves {changed['to']}")
    else:
        typer.echo(
            f"{instance}: {changed['from']} → {changed['to']} in {changed['seconds']:.3f} s, "
            f"including {changed['drain_s']:.3f} s to finish running requests"
        )
    if "E" in changed["from"] and "E" not in changed["to"]:
        roles = [one["role"] for one in ask_admin(gateway, "GET", "/instances")["instances"]]
        if all(roles) and not any("E" in one for one in roles):
            typer.echo("No instance has the stage E now: P encodes media itself.")
