"""``epd-serve logs``: what the processes of a deployment said."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from epd_serve.cli.admin import AdminUrl, ask_admin, choose_gateway
from epd_serve.launch.processes.logs import LogPiece, log_files, log_piece, log_root, log_runs
from epd_serve.rpc.admin import AdminClient

_POLL_S = 0.3


def logs(
    name: Annotated[
        str | None, typer.Argument(help="Of a process, as in p0 or gateway; without one: the last lines of each.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")] = False,
    run: Annotated[
        int, typer.Option(min=1, help="1 is the latest run of 'epd-serve up', or of an agent; 2 the one before.")
    ] = 1,
    list_runs: Annotated[bool, typer.Option("--list", help="List the runs that are kept.")] = False,
    admin: AdminUrl = None,
) -> None:
    """Show the logs of a deployment, also after its end: those of the last runs are kept.

    They are those of this machine, or with --admin those of all hosts of a deployment file.
    """
    found = log_runs()
    if list_runs:
        for number, directory in enumerate(found, start=1):
            typer.echo(f"{number:>3}  {directory}  {' '.join(log_files(directory))}")
        return
    source: _Run | _Hosts
    if admin is not None:
        source = _Hosts(choose_gateway(None, admin)[1])
    elif len(found) < run:
        raise ValueError(f"{log_root()} has the logs of {len(found)} runs; 'epd-serve up' writes them")
    else:
        source = _Run(found[run - 1])
    names = source.names()
    if name is not None and name not in names:
        raise ValueError(f"{source.where} has no log of {name!r}; it has those of {', '.join(names) or 'nothing'}")
    ends = {one: _show(source, one, whole=name is not None) for one in names if name in (None, one)}
    while follow:
        time.sleep(_POLL_S)
        for one in source.names() if name is None else [name]:
            ends[one] = _show_rest(source, one, ends.get(one, 0), f"{one:<8} " if name is None else "")


class _Run:
    """The logs of one run on this machine, by the names of their processes."""

    def __init__(self, directory: Path) -> None:
        self.where = str(directory)
        self._directory = directory

    def names(self) -> list[str]:
        return list(log_files(self._directory))

    def title(self, name: str) -> str:
        return str(log_files(self._directory)[name])

    def piece(self, name: str, after: int | None) -> LogPiece:
        return log_piece(log_files(self._directory)[name], after)


class _Hosts:
    """The logs of all hosts of a deployment, as its gateway gets them from their agents."""

    def __init__(self, gateway: AdminClient) -> None:
        self.where = str(gateway.where)
        self._gateway = gateway
        self._host_of: dict[str, str] = {}
        self._silent: dict[str, str] = {}

    def names(self) -> list[str]:
        for host, names in ask_admin(self._gateway, "GET", "/logs")["logs"].items():
            if isinstance(names, str):
                if self._silent.get(host) != names:
                    typer.echo(f"{host} does not answer: {names}", err=True)
                self._silent[host] = names
            else:
                self._silent.pop(host, None)
                self._host_of.update(dict.fromkeys(names, host))
        return [name for name, host in self._host_of.items() if host not in self._silent]

    def title(self, name: str) -> str:
        return f"{name} on {self._host_of[name]}"

    def piece(self, name: str, after: int | None) -> LogPiece:
        path = f"/logs/{self._host_of[name]}/{name}?after={-1 if after is None else after}"
        return msgspec.convert(ask_admin(self._gateway, "GET", path), LogPiece)


def _show(source: _Run | _Hosts, name: str, *, whole: bool) -> int:
    if whole:
        return _show_rest(source, name, 0, "")
    piece = source.piece(name, None)
    typer.echo(f"==> {source.title(name)} <==")
    typer.echo(piece.text, nl=False)
    return piece.end


def _show_rest(source: _Run | _Hosts, name: str, place: int, prefix: str) -> int:
    """Show what was written from ``place`` on, up to the last end of a line, and return where that is."""
    while (piece := source.piece(name, place)).text:
        for line in piece.text.splitlines():
            typer.echo(prefix + line)
        place = piece.end
    return place
