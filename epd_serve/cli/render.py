"""``epd-serve render``: convert a deployment file for another supervisor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

render = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@render.callback()
def formats() -> None:
    """Render a deployment file for another supervisor."""


@render.command()
def kubernetes(
    file: Annotated[Path, typer.Argument(help="Deployment file.")],
    namespace: Annotated[str | None, typer.Option(help="Override that of --values.")] = None,
    image: Annotated[str | None, typer.Option(help="Image of the instances; overrides that of --values.")] = None,
    values: Annotated[
        Path | None, typer.Option(help="YAML file with claims, resources and more: see the guide.")
    ] = None,
) -> None:
    """Print Kubernetes manifests for 'kubectl apply -f -'."""
    from epd_serve.launch.remote.kubernetes import Values, load_values
    from epd_serve.launch.remote.kubernetes import render as rendered

    chosen = load_values(values) if values else Values()
    flags = {key: value for key, value in (("namespace", namespace), ("image", image)) if value is not None}
    typer.echo(rendered(file, chosen.model_copy(update=flags)), nl=False)
