"""Flags shared by several commands."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from epd_serve.config import DEMO_MODEL
from epd_serve.config.model_files import resolve_model_name

Host = Annotated[str | None, typer.Option(help="Address of the gateway; overrides the file's.")]
Port = Annotated[
    int | None, typer.Option(min=0, max=65535, help="Port of the gateway, 0 for a free one; overrides the file's.")
]

BaseUrl = Annotated[str, typer.Option("--base-url", "--url", help="URL of a server with OpenAI's chat API.")]

On = Annotated[
    str | None,
    typer.Option(metavar="ray[=ADDRESS]", help="A Ray cluster: this machine's, RAY_ADDRESS's, or a head's."),
]


def writable(path: Path | None) -> Path | None:
    """Return the path of a file to write later. Raises ValueError unless its directory can be written."""
    if path is not None and not os.access(path.parent, os.W_OK | os.X_OK):
        raise ValueError(f"{path} cannot be written: directory {path.parent} does not exist or is read-only")
    return path


def ray_address(on: str) -> str:
    """Return the address in ``ray=ADDRESS``, "" for ``ray``. Raises ValueError for anything else."""
    name, _, address = on.partition("=")
    if name != "ray":
        raise ValueError(f"--on {on}: write --on ray, or --on ray=ADDRESS with the address of the head")
    return address


def model_of(name: str) -> str:
    """Resolve a model name relative to the working directory, not to the file."""
    return name if name == DEMO_MODEL else resolve_model_name(name, Path.cwd())
