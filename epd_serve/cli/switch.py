"""``epd-serve switch``: another role for a running instance."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import aiohttp
import msgspec
import typer

from epd_serve.config.keys import ADMIN_KEY, admin_headers
from epd_serve.types import Role

AdminUrl = Annotated[str, typer.Option("--admin", help="The gateway's admin plane: gateway.admin.")]
_MARGIN_S = 130.0


def switch(
    instance: Annotated[str, typer.Argument(help="Its name, as in p0.")],
    role: Annotated[str, typer.Argument(help="E, P, D, EP, ED, PD or EPD; the role it has calls an order back.")],
    admin: AdminUrl = "http://127.0.0.1:8001",
    deadline: Annotated[
        float, typer.Option(min=0.001, help="Seconds after which it serves its old role again.")
    ] = 30.0,
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds for which running answers may end there; then others go on.")
    ] = 1.0,
) -> None:
    """Have a running instance serve another role; returns when it does.

    The key of the admin plane is read from EPD_SERVE_ADMIN_KEY.
    """
    body = {"role": str(Role.parse(role)), "deadline_s": deadline, "patience_s": patience}
    changed = ask_admin("POST", f"{admin}/instances/{instance}/role", body, deadline + _MARGIN_S)
    if changed["from"] == changed["to"]:
        typer.echo(f"{instance} serves {changed['to']}")
    else:
        typer.echo(
            f"{instance}: {changed['from']} → {changed['to']} in {changed['seconds']:.3f} s, "
            f"{changed['drain_s']:.3f} s of it to finish what it had"
        )


def ask_admin(method: str, url: str, body: dict[str, Any] | None, timeout_s: float) -> Any:
    """The JSON of an admin plane's answer. Raises ValueError where it refuses, or is not there."""
    try:
        status, data = asyncio.run(_ask(method, url, body, timeout_s))
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ValueError(
            f"nothing answers at {url} ({error}); set gateway.admin.port in the deployment file, and --admin here"
        ) from error
    try:
        content = msgspec.json.decode(data)
    except msgspec.DecodeError:
        raise ValueError(f"{url} answered {status}, and no JSON; is it an admin plane?") from None
    if status >= 400:
        hint = f"; its key is read from {ADMIN_KEY}" if status == 401 else ""
        said = content.get("error", {}) if isinstance(content, dict) else {}
        raise ValueError(f"{said.get('message') or content}{hint}")
    return content


async def _ask(method: str, url: str, body: dict[str, Any] | None, timeout_s: float) -> tuple[int, bytes]:
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with (
        aiohttp.ClientSession(timeout=timeout, headers=admin_headers(), trust_env=False) as session,
        session.request(method, url, json=body) as answer,
    ):
        return answer.status, await answer.read()
