"""``epd-serve verify``: command line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from epd_serve.cli.admin import Deployment, server_url
from epd_serve.cli.flags import BaseUrl, writable


def verify(
    base_url: BaseUrl = "",
    deployment: Deployment = None,
    model: Annotated[str, typer.Option(help="Model; required if the server has several.")] = "",
    suite: Annotated[list[str] | None, typer.Option(help="api, answers, media or faults; default: all.")] = None,
    check: Annotated[list[str] | None, typer.Option(help="A single check, by its name in --list.")] = None,
    reference: Annotated[str, typer.Option(help="URL of a monolithic server of the same model.")] = "",
    record: Annotated[
        Path | None,
        typer.Option(
            help="File of the reference's answers: read, or written with --reference.", callback=writable
        ),
    ] = None,
    admin: Annotated[
        list[str] | None,
        typer.Option(help="A fault's command, as kill-E='COMMAND'; up:PID; pids:E=12,P=13."),
    ] = None,
    work_dir: Annotated[Path, typer.Option(help="Directory for verify.json.")] = Path("verify"),
    slowness: Annotated[
        float, typer.Option(help="Factor on all time limits, for a server on a slow machine.", min=0.01)
    ] = 1.0,
    list_: Annotated[bool, typer.Option("--list", help="Explain every check and send nothing.")] = False,
) -> None:
    """Check any OpenAI-compatible multimodal server: types, answers, hostile media, faults.

    The default server is this machine's running deployment. The exit code is 1 if a check fails. OPENAI_API_KEY is
    sent if set.
    """
    from epd_serve.verify.runner import list_checks, verify_server

    if list_:
        list_checks(suite or ())
        return
    code = verify_server(
        server_url(base_url, deployment),
        model=model,
        suites=suite or (),
        names=check or (),
        reference=reference.rstrip("/").removesuffix("/v1"),
        record=record,
        admin=admin or (),
        directory=work_dir,
        slowness=slowness,
        api_key=os.environ.get("OPENAI_API_KEY") or None,
    )
    raise typer.Exit(code)
