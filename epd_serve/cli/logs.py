"""``epd-serve logs``: the output of a deployment's processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from epd_serve.cli.admin import Deployment
from epd_serve.launch.processes.runs import all_runs, find_run, log_root, running


def logs(
    name: Annotated[
        str | None, typer.Argument(help="Process, as in p0 or gateway; default: the last lines of each.")
    ] = None,
    deployment: Deployment = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow new output until Ctrl-C.")] = False,
) -> None:
    """Show the logs of a deployment of this machine, also after its end, with tail(1).

    The default deployment is the running one, or the last one.
    """
    if deployment is None and running():
        deployment = find_run(None).address
    called = (Path(run.logs) for run in all_runs() if deployment is None or run.is_called(deployment))
    if (directory := next(called, None)) is None:
        raise ValueError(f"{log_root()} lacks logs of {deployment or 'a deployment'}; 'epd-serve up' writes them")
    files = sorted(directory.glob("*.log"))
    chosen = [str(file) for file in files if name in (None, file.stem)]
    if not chosen:
        names = ", ".join(file.stem for file in files)
        raise ValueError(f"{directory} lacks a log of {name!r}; available: {names or 'none'}")
    os.execvp("tail", ["tail", "-n", "20" if name is None else "+1", *(["-F"] if follow else []), *chosen])
