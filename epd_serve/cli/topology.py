"""``epd-serve topology``: explain a topology."""

from __future__ import annotations

from typing import Annotated

import typer

from epd_serve.topology import parse_topology
from epd_serve.topology.draw import draw, explain


def topology(text: Annotated[str, typer.Argument(help="As in '(E-P)-D'; quote it for the shell.")]) -> None:
    """Draw a topology and explain which stages run on which device."""
    parsed = parse_topology(text)
    typer.echo(f"{parsed}\n\n{draw(parsed)}\n")
    for sentence in explain(parsed):
        typer.echo(sentence)
