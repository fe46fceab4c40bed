"""The tester's cost of a request: ``python -m benchmarks.tester.speed [--out FILE.json]``.

The server is benchmarks/gateway/stage.c, which answers from memory. It runs on one core, the tester on another. Of
each cell the round that others on the machine disturbed least is given, all rounds beside it.
"""

from __future__ import annotations

import io
import os
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import argument_parser, machine, write
from benchmarks.gateway.answers import write_answers
from benchmarks.gateway.programs import compile_programs, free_ports, running, wait_until_served
from benchmarks.tester.requests import Plain
from epd_serve.bench.session import Session
from epd_serve.bench.types import RunSettings, Summary
from epd_serve.protocol.openai import chunks

_TOKENS = 64
_IMAGE_BYTES = 250_000


@dataclass(frozen=True, kw_only=True)
class Cell:
    """``gap_ms`` between the tokens of the server; 0: all at once."""

    name: str
    rate: float
    gap_ms: int
    image_bytes: int = 0


CELLS = (
    Cell(name="text", rate=200, gap_ms=0),
    Cell(name="text, a token each 10 ms", rate=200, gap_ms=10),
    Cell(name="images of 250 KB", rate=60, gap_ms=0, image_bytes=_IMAGE_BYTES),
    Cell(name="images of 250 KB, a token each 10 ms", rate=60, gap_ms=10, image_bytes=_IMAGE_BYTES),
    Cell(name="text, more than it can send", rate=4000, gap_ms=0),
    Cell(name="images of 250 KB, more than it can send", rate=1000, gap_ms=0, image_bytes=_IMAGE_BYTES),
)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of requests in each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="epd-serve-tester-") as name:
        directory = Path(name)
        report = _measure(directory, options.seconds, options.rounds, cores)
    for cell, figures in report["cells"].items():
        print(f"{cell}: {_line(figures)}")
    if options.out is not None:
        write(options.out, report)


def _measure(directory: Path, seconds: float, rounds: int, cores: list[int]) -> dict[str, Any]:
    compile_programs(directory)
    (port,) = free_ports(1)
    write_answers(directory, [("D", port)])
    _write_last(directory)
    command = [str(directory / "stage"), str(directory), str(_TOKENS), f"D:{port}"]
    report: dict[str, Any] = {
        "command": f"python -m benchmarks.tester.speed --seconds {seconds:g} --rounds {rounds}",
        "machine": machine(),
        "load_average": os.getloadavg()[0],
        "tokens": _TOKENS,
        "cells": {},
    }
    with running(command, directory / "stage.log") as server:
        wait_until_served(port, b"{}", directory / "stage.log")
        if len(cores) > 1:
            server.cpu_affinity([cores[1]])
        os.sched_setaffinity(0, {cores[0]})
        found: dict[str, list[dict[str, Any]]] = {cell.name: [] for cell in CELLS}
        for number in range(rounds):
            for cell in CELLS:
                path = directory / f"run-{number}-{len(found[cell.name])}-{CELLS.index(cell)}"
                figures = _run(cell, port, path, seconds)
                found[cell.name].append(figures)
                print(f"round {number + 1}: {cell.name}: {_line(figures)}", flush=True)
    for name, figures in found.items():
        # On a machine that others use: the round that they disturbed least.
        best = max(figures, key=_undisturbed)
        report["cells"][name] = {**best, "rounds": figures}
    return report


def _run(cell: Cell, port: int, path: Path, seconds: float) -> dict[str, Any]:
    url = f"http://127.0.0.1:{port}"
    with urllib.request.urlopen(f"{url}/gap/{cell.gap_ms}") as answer:
        answer.read()
    workload = Plain(
        num_items=int(min(cell.rate * seconds, 8000)),
        num_words=100,
        max_tokens=_TOKENS,
        image_bytes=cell.image_bytes,
    )
    settings = RunSettings(
        base_url=url,
        model="",
        workload="plain",
        num_requests=0,
        seed=0,
        arrivals="constant",
        rate=cell.rate,
        num_warmups=20,
    )
    session = Session(console=Console(file=io.StringIO()))
    run, summary = session.begin(path, settings, workload)
    assert summary is not None
    (segment,) = run.segments()
    return {
        "planned_rate": cell.rate,
        "achieved_rate": round(summary.total.achieved_rate, 2),
        "failed": summary.total.num_failed,
        "cpu_ms_per_request": round(1e3 * segment.cpu_s / segment.num_requests, 4),
        "cpu_share": round(segment.cpu_s / segment.wall_s, 4),
        "ttft_p50_ms": round(1e3 * summary.total.figures["ttft"].median, 3),
        "send_lag_p50_ms": round(1e3 * summary.total.figures["send_lag"].median, 3),
        "send_lag_p99_ms": round(1e3 * summary.total.figures["send_lag"].p99, 3),
        "loop_lag_p99_ms": round(1e3 * segment.loop_lag_p99_s, 3),
        "said_so": _said_so(summary),
    }


def _undisturbed(figures: dict[str, Any]) -> tuple[float, float]:
    """By the share of the rate that was sent, to a per cent, then by how late."""
    return round(figures["achieved_rate"] / figures["planned_rate"], 2), -figures["send_lag_p99_ms"]


def _line(figures: dict[str, Any]) -> str:
    parts = [
        f"{figures['achieved_rate']:.1f} of {figures['planned_rate']:.0f} req/s",
        f"{figures['cpu_ms_per_request']:.3f} ms of CPU a request, {figures['cpu_share']:.0%} of a core",
        f"sent {figures['send_lag_p99_ms']:.1f} ms late (p99)",
        f"event loop {figures['loop_lag_p99_ms']:.1f} ms late (p99)",
    ]
    return ", ".join(parts) + (", and said so" if figures["said_so"] else "")


def _said_so(summary: Summary) -> bool:
    return any("tester" in warning or "fell short" in warning for warning in summary.warnings)


def _write_last(directory: Path) -> None:
    """An end with a finish_reason, which the gateway's benchmark does without."""
    common = {"id": "chatcmpl-0", "object": "chat.completion.chunk", "created": 1750000000, "model": "demo"}
    finish = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    usage = {"prompt_tokens": 100, "completion_tokens": _TOKENS, "total_tokens": 100 + _TOKENS}
    events = (
        chunks.event({**common, "choices": [finish]}),
        chunks.event({**common, "choices": [], "usage": usage}),
        chunks.DONE,
        b"",
    )
    (directory / "openai_last").write_bytes(b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in events))


if __name__ == "__main__":
    main()
