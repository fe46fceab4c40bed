"""Flags that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from epd_serve.config import DEMO_MODEL
from epd_serve.config.model_files import beside

ParentPid = Annotated[
    int | None, typer.Option(help="End when this process, the starter of this one, ends.", hidden=True)
]
Host = Annotated[str | None, typer.Option(help="Address of the gateway; over the file's.")]
Port = Annotated[
    int | None, typer.Option(min=0, max=65535, help="Port of the gateway, 0 for a free one; over the file's.")
]

BaseUrl = Annotated[
    str, typer.Option("--base-url", "--url", help="Of the server, any that speaks OpenAI's chat API.")
]

Join = Annotated[
    list[str] | None,
    typer.Option(
        metavar="URL",
        help="Admin plane of a gateway to join, once for each; a host name with several addresses is all of them. "
        "Key: EPD_SERVE_CLUSTER_KEY or EPD_SERVE_ADMIN_KEY.",
    ),
]

On = Annotated[
    str | None,
    typer.Option(
        metavar="ray[=ADDRESS]", help="A Ray cluster: that of this machine or RAY_ADDRESS, or of a head."
    ),
]


def ray_address(on: str) -> str:
    """The address in ``ray=ADDRESS``, "" in ``ray``. Raises ValueError for anything else."""
    name, _, address = on.partition("=")
    if name != "ray":
        raise ValueError(f"--on {on}: write --on ray, or --on ray=ADDRESS with the address of the head")
    return address


def model_of(name: str) -> str:
    """Relative to where the user stands, not to the file."""
    return name if name == DEMO_MODEL else beside(name, Path.cwd())


def tie_to(parent_pid: int | None) -> None:
    if parent_pid is not None:
        from epd_serve.lifeline import die_with_parent

        die_with_parent(parent_pid)
