"""``epd-serve logs``: the output of a deployment's processes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from epd_serve.cli.admin import Deployment
from epd_serve.launch.processes.runs import all_runs, find_run, log_files, log_root, read_log, running

_POLL_S = 0.3


def logs(
    name: Annotated[
        str | None, typer.Argument(help="Of a process, as in p0 or gateway; without one: the last lines of each.")
    ] = None,
    deployment: Deployment = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")] = False,
    run: Annotated[int, typer.Option(min=1, help="1 is the deployment's latest run, 2 the one before.")] = 1,
    list_runs: Annotated[bool, typer.Option("--list", help="List the runs that are kept.")] = False,
) -> None:
    """Show the logs of a deployment of this machine, also after its end: those of the last runs are kept.

    Without --deployment it is the one that runs. Where none runs, the runs of all deployments count.
    """
    found = _runs_of(deployment)
    if list_runs:
        for number, directory in enumerate(found, start=1):
            typer.echo(f"{number:>3}  {all_runs()[directory]}  {directory}  {' '.join(log_files(directory))}")
        return
    if len(found) < run:
        whose = "" if deployment is None else f" of {deployment}"
        raise ValueError(f"{log_root()} has the logs of {len(found)} runs{whose}; 'epd-serve up' writes them")
    directory = found[run - 1]
    files = log_files(directory)
    if name is not None and name not in files:
        raise ValueError(f"{directory} has no log of {name!r}; it has those of {', '.join(files) or 'nothing'}")
    ends = {one: _show(file, whole=name is not None) for one, file in files.items() if name in (None, one)}
    while follow:
        time.sleep(_POLL_S)
        for one, file in log_files(directory).items():
            if name in (None, one):
                ends[one] = _show_rest(file, ends.get(one, 0), f"{one:<8} " if name is None else "")


def _runs_of(deployment: str | None) -> list[Path]:
    """Return the log directories of the runs that are meant, the latest first."""
    if deployment is None and running():
        deployment = find_run(None)[1].address
    return [directory for directory, run in all_runs().items() if deployment is None or run.is_called(deployment)]


def _show(file: Path, *, whole: bool) -> int:
    if whole:
        return _show_rest(file, 0, "")
    text, end = read_log(file, None)
    typer.echo(f"==> {file} <==")
    typer.echo(text, nl=False)
    return end


def _show_rest(file: Path, place: int, prefix: str) -> int:
    """Show what was written from ``place`` on, up to the last end of a line, and return where that is."""
    text, end = read_log(file, place)
    while text:
        for line in text.splitlines():
            typer.echo(prefix + line)
        place = end
        text, end = read_log(file, place)
    return place
