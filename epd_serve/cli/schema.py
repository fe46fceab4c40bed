"""``epd-serve schema``: the JSON schema of deployment files."""

from __future__ import annotations

import json

import typer

from epd_serve.config import deployment_schema


def schema() -> None:
    """Print the JSON schema of deployment files, for editors."""
    typer.echo(json.dumps(deployment_schema(), indent=2))
