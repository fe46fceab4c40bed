"""``epd-serve switch``: another role for a running instance."""

from __future__ import annotations

from typing import Annotated

import typer

from epd_serve.cli.admin import AdminUrl, Deployment, ask_admin, choose_gateway
from epd_serve.types import Role

_MARGIN_S = 130.0


def switch(
    instance: Annotated[str, typer.Argument(help="Its name, as in p0.")],
    role: Annotated[str, typer.Argument(help="E, P, D, EP, ED, PD or EPD; the role it has calls an order back.")],
    deployment: Deployment = None,
    admin: AdminUrl = None,
    deadline: Annotated[
        float, typer.Option(min=0.001, help="Seconds after which it serves its old role again.")
    ] = 30.0,
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds for which running answers may end there; then others go on.")
    ] = 1.0,
) -> None:
    """Have a running instance serve another role; returns when it does.

    It is one of the deployment that runs on this machine, or of the gateway at --admin, whose key is read from
    EPD_SERVE_ADMIN_KEY.
    """
    body = {"role": str(Role.parse(role)), "deadline_s": deadline, "patience_s": patience}
    _, gateway = choose_gateway(deployment, admin)
    changed = ask_admin(gateway, "POST", f"/instances/{instance}/role", body, deadline + _MARGIN_S)
    if changed["from"] == changed["to"]:
        typer.echo(f"{instance} serves {changed['to']}")
    else:
        typer.echo(
            f"{instance}: {changed['from']} → {changed['to']} in {changed['seconds']:.3f} s, "
            f"{changed['drain_s']:.3f} s of it to finish what it had"
        )
