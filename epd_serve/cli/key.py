"""``epd-serve key``: API keys for the gateway."""

from __future__ import annotations

from typing import Annotated

import typer

from epd_serve.config.gateway import ApiKeyConfig
from epd_serve.config.keys import new_key

key = typer.Typer(
    help="Make API keys for the gateway.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@key.callback()
def _keys() -> None:
    """Make API keys for the gateway."""


@key.command("new", short_help="Make an API key, and its hash.")
def new(name: Annotated[str, typer.Argument(help="Name of the key, for logs and metrics.")]) -> None:
    """Make an API key: the key for its holder, its hash for gateway.api_keys of the deployment file."""
    secret, hashed = new_key()
    try:
        ApiKeyConfig(name=name, hash=hashed)
    except ValueError:
        raise ValueError(
            f"{name!r} is not a valid key name; use up to 64 letters, digits, '.', '_' and '-'"
        ) from None
    typer.echo(f"{secret}\n\nThis is the key; it is shown only once. Its hash for the deployment file:\n")
    typer.echo(f"gateway:\n  api_keys:\n    - name: {name}\n      hash: {hashed}")
