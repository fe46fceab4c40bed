"""The gateway's own HTTP server beside uvicorn's, with the same handlers: ``python -m benchmarks.http_server``.

The gateways are measured in turn, round by round, as ``benchmarks.gateway`` does; a ratio is the median of those
of the rounds. ``uvicorn`` is its protocol for httptools as it comes, without the gateway's limits on heads and on
slow senders; ``bounded`` is the same with them, as the gateway serves what is no plain POST.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from benchmarks.common import argument_parser, machine, write
from benchmarks.gateway import serve
from benchmarks.gateway.__main__ import measure_each
from benchmarks.gateway.answers import CELLS, TOKENS
from benchmarks.gateway.programs import Peer, Stages
from proxy import main as gateway
from proxy.http.connection import GatewayConnection
from proxy.http.http1 import StrictHttp

_OWN = "own"
_SERVERS: dict[str, type] = {_OWN: GatewayConnection, "uvicorn": HttpToolsProtocol, "bounded": StrictHttp}
_LOADS = ("text, c16", "1 image, c16", "text, 10 ms gaps, c256")


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        _, _, server, *sys.argv[1:] = sys.argv
        gateway.GatewayConnection = _SERVERS[server]  # type: ignore[misc]
        serve.main()
        return
    parser = argument_parser(__doc__, "http-server-cpu.json")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="epd-serve-http-") as directory:
        report = _measure(Path(directory), options.rounds)
    print(write(options.output, report))


def _peer(server: str) -> Peer:
    def command(stages: Stages, port: int, directory: Path) -> list[str]:
        instances = [f"{role}{number}=http://127.0.0.1:{number}" for role, number in stages.all]
        own = [sys.executable, "-m", "benchmarks.http_server", "serve", server]
        return [*own, str(port), str(directory / f"{server}-access.log"), *instances]

    return Peer(name=server, what=_SERVERS[server].__name__, command=command)


def _measure(directory: Path, rounds: int) -> dict[str, Any]:
    cells = [cell for cell in CELLS if cell.name in _LOADS]
    runs = measure_each([_peer(server) for server in _SERVERS], cells, directory, rounds)
    found = {}
    for cell, by in runs.items():
        cpu = {server: [one["cpu_ms"] for one in by[server]] for server in _SERVERS}
        found[cell] = {
            "failed": sum(one["failed"] for server in _SERVERS for one in by[server]),
            "cpu_ms": {server: round(statistics.median(many), 4) for server, many in cpu.items()},
            "of_own": {
                server: round(statistics.median(a / b for a, b in zip(many, cpu[_OWN], strict=True)), 3)
                for server, many in cpu.items()
                if server != _OWN
            },
        }
    return {"machine": machine(), "rounds": rounds, "tokens": TOKENS, "cells": found}


if __name__ == "__main__":
    main()
