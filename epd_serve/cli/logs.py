"""``epd-serve logs``: what the processes of a deployment said."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

_TAIL_LINES, _POLL_S = 20, 0.3


def logs(
    name: Annotated[
        str | None, typer.Argument(help="Of a process, as in p0 or gateway; without one: the last lines of each.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")] = False,
    run: Annotated[int, typer.Option(min=1, help="1 is the latest run of 'epd-serve up', 2 the one before.")] = 1,
    list_runs: Annotated[bool, typer.Option("--list", help="List the runs that are kept.")] = False,
) -> None:
    """Show the logs of a deployment, also after its end: those of the last runs are kept."""
    from epd_serve.launch.runtime import log_root, log_runs

    found = log_runs()
    if list_runs:
        for number, directory in enumerate(found, start=1):
            kept = sorted(file.stem for file in directory.glob("*.log"))
            typer.echo(f"{number:>3}  {directory}  {' '.join(kept)}")
        return
    if len(found) < run:
        raise ValueError(f"{log_root()} has the logs of {len(found)} runs; 'epd-serve up' writes them")
    directory = found[run - 1]
    files = sorted(directory.glob("*.log"))
    if name is not None:
        names = ", ".join(file.stem for file in files)
        files = [file for file in files if file.stem == name]
        if not files:
            raise ValueError(f"{directory} has no log of {name!r}; it has those of {names or 'nothing'}")
    places = {file: _show(file, whole=name is not None) for file in files}
    while follow:
        time.sleep(_POLL_S)
        for file in sorted(directory.glob("*.log")) if name is None else files:
            places[file] = _show_rest(file, places.get(file, 0), named=name is None)


def _show(file: Path, *, whole: bool) -> int:
    data = file.read_bytes()
    lines = data.decode("utf-8", "replace").splitlines()
    if not whole:
        typer.echo(f"==> {file} <==")
        lines = lines[-_TAIL_LINES:]
    for line in lines:
        typer.echo(line)
    return len(data)


def _show_rest(file: Path, place: int, *, named: bool) -> int:
    """Show what was written from ``place`` on, up to the last end of a line, and return where that is."""
    with file.open("rb") as stream:
        stream.seek(place)
        data = stream.read()
    whole = data[: data.rfind(b"\n") + 1]
    for line in whole.decode("utf-8", "replace").splitlines():
        typer.echo(f"{file.stem:<8} {line}" if named else line)
    return place + len(whole)
