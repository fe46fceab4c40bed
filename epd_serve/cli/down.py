"""``epd-serve down``: the end of a deployment that no terminal holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from epd_serve.cli.flags import On, ray_address
from epd_serve.config import load_config


def down(file: Annotated[Path, typer.Argument(help="Deployment file that was brought up.")], on: On) -> None:
    """End a deployment on a cluster: its requests are finished, then its devices are free."""
    address = ray_address(on)
    from epd_serve.launch.remote.ray import down as end

    end(load_config(file), file.stem, address)
