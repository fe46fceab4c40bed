"""``epd-serve version``."""

from __future__ import annotations

import typer


def version() -> None:
    """Print the version."""
    from epd_serve import __version__

    typer.echo(f"epd-serve {__version__}")
