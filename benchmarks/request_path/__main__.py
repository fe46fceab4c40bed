"""Count the files and functions that one image request of four tokens enters, in all processes of E-P-D.

Run as ``python -m benchmarks.request_path`` from the root of the repository. Every Python process of the
deployment carries a profile hook (``sitecustomize.py`` beside this file). A first request warms caches and
connections, the next ones are recorded. A function counts when it runs between a request's start and its end, so
probes and metrics that run then count too: the lowest of several recordings is the figure. Comprehensions count
as functions, as they are before Python 3.12. Functions that also run in three idle seconds are left out of the
order of a request's way and of one count.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import Coroutine
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.common import ROOT, argument_parser, write
from benchmarks.topologies import image_message
from epd_serve.config import change_config, load_config
from epd_serve.launch.deployment import LocalDeployment

ROUNDS = 5
#: What is done when the client has its answer belongs to the request.
_END_S = 0.1


class Entry(NamedTuple):
    """The first entry of one function in one thread of a process."""

    time_ns: int
    thread: int
    file: str
    line: int
    name: str


Recording = dict[str, list[Entry]]  # by process


async def record(rounds: int) -> list[tuple[Recording, Recording]]:
    """For each round: what every process enters while nothing is asked, and while one request is answered."""
    settings = {"gateway": {"port": 0}, "instances": {"base_port": 0}}
    config = change_config(load_config(ROOT / "deploy" / "cpu-e-p-d.yaml"), settings)
    recordings = []
    with tempfile.TemporaryDirectory() as directory:
        os.environ |= {
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(ROOT)]),
            "REQUEST_PATH_DIRECTORY": directory,
            "REQUEST_PATH_ROOT": str(ROOT),
        }
        async with (
            LocalDeployment(config, ready_timeout_s=300) as deployment,
            httpx.AsyncClient(base_url=deployment.gateway_url, timeout=300) as client,
        ):
            await ask(client)
            for _ in range(rounds):
                idle = await recorded(Path(directory), asyncio.sleep(3))
                recordings.append((idle, await recorded(Path(directory), ask(client))))
    return recordings


async def ask(client: httpx.AsyncClient) -> None:
    body = {"model": "demo", "temperature": 0, "max_tokens": 4, "ignore_eos": True, "stream": True}
    answer = await client.post("/v1/chat/completions", json=body | {"messages": [image_message()]})
    answer.raise_for_status()


def records(pid: int) -> bool:
    """Return whether a process handles SIGUSR2: trackers, fork servers and decoders do not."""
    status = Path(f"/proc/{pid}/status").read_text()
    [caught] = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")]
    return bool(int(caught, 16) >> (signal.SIGUSR2 - 1) & 1)


async def recorded(directory: Path, work: Coroutine[Any, Any, None]) -> Recording:
    """By process: the functions that it enters while ``work`` runs."""
    processes = [process for process in psutil.Process().children(recursive=True) if records(process.pid)]
    for process in processes:
        process.send_signal(signal.SIGUSR2)
    await asyncio.sleep(0.2)
    await work
    await asyncio.sleep(_END_S)
    for process in processes:
        process.send_signal(signal.SIGUSR2)
    files = [directory / f"{process.pid}.json" for process in processes]
    async with asyncio.timeout(60):
        while not all(file.exists() for file in files):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    rows = {file.stem: sorted(Entry(*row) for row in json.loads(file.read_text())) for file in files}
    for file in files:
        file.unlink()
    return rows


def summary(idle: Recording, busy: Recording) -> dict[str, Any]:
    """The figures of one request, the names of its files and the folders of its way, process by process."""
    functions = {(entry.file, entry.line) for entries in busy.values() for entry in entries}
    named = {(e.file, e.line) for entries in busy.values() for e in entries if not e.name.endswith(">")}
    files = {file for file, _ in functions}
    background = {(entry.file, entry.line) for entries in idle.values() for entry in entries}
    own = [[entry for entry in entries if (entry.file, entry.line) not in background] for entries in busy.values()]
    own_named = {(e.file, e.line) for entries in own for e in entries} & named
    ways = [way(entries) for entries in sorted(filter(None, own))]
    return {
        "files": len(files),
        "functions": len(functions),
        "of these comprehensions and lambdas": len(functions - named),
        "named functions that do not run in idle seconds": len(own_named),
        "lines of these files": sum(len((ROOT / file).read_text().splitlines()) for file in files),
        "files before an instance is called": len(before_instances(own)),
        "returns to a folder": sum(
            folder in folders[:at] for folders in ways for at, folder in enumerate(folders)
        ),
        "ways": ways,
        "file names": sorted(files),
    }


def before_instances(processes: list[list[Entry]]) -> set[str]:
    """The files that the gateway enters before any instance does anything for the request."""
    gateways = [entries for entries in processes if any(entry.file.startswith("proxy/") for entry in entries)]
    called_ns = min(entries[0].time_ns for entries in processes if entries and entries not in gateways)
    return {entry.file for entries in gateways for entry in entries if entry.time_ns < called_ns}


def way(entries: list[Entry]) -> list[str]:
    """The folders of a process in the order in which the request first enters their files."""
    files = list(dict.fromkeys(entry.file for entry in entries))
    folders = [str(Path(file).parent) for file in files]
    return folders[:1] + [after for before, after in pairwise(folders) if after != before]


def main() -> None:
    options = argument_parser(__doc__, "request-path.json").parse_args()
    summaries = [summary(idle, busy) for idle, busy in asyncio.run(record(ROUNDS))]
    best = min(summaries, key=lambda row: (row["functions"], row["files"]))
    write(options.output, best)
    table = Table("one image request of 4 tokens through E-P-D", "lowest", "of all rounds")
    for name in [name for name, figure in best.items() if isinstance(figure, int)]:
        table.add_row(name, str(best[name]), str([row[name] for row in summaries]))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
