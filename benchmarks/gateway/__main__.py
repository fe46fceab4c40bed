"""The cost of a gateway: ``python -m benchmarks.gateway [--vllm-proxy FILE] [--vllm-router PROGRAM]``.

A table is written beside the results.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import argument_parser, machine, write
from benchmarks.gateway.answers import CELLS, TOKENS, Cell, write_answers, write_bodies
from benchmarks.gateway.programs import (
    Peer,
    Stages,
    compile_programs,
    free_ports,
    load,
    ours,
    running,
    usage,
    vllm_epd,
    vllm_router,
    wait_until_served,
)

Figures = dict[str, float]


def main() -> None:
    options = _options()
    chosen = [ours()]
    if options.vllm_proxy is not None:
        chosen.append(vllm_epd(options.vllm_proxy, options.python))
    if options.vllm_router is not None:
        chosen.append(vllm_router(options.vllm_router))
    with tempfile.TemporaryDirectory(prefix="epd-serve-gateway-") as directory:
        report = measure(chosen, Path(directory), options.rounds)
    print(table(report))
    write(options.output, report)
    options.output.with_suffix(".md").write_text(table(report))


def _options() -> argparse.Namespace:
    parser = argument_parser(__doc__, "gateway-cpu.json")
    parser.add_argument("--vllm-proxy", type=Path, help="disagg_epd_proxy.py from the examples of vLLM's sources")
    parser.add_argument(
        "--python", default=sys.executable, help="that runs it; needs aiohttp, fastapi, msgspec, uvloop"
    )
    parser.add_argument("--vllm-router", help="program of the package vllm-router")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved; medians are taken")
    return parser.parse_args()


def measure(chosen: list[Peer], directory: Path, rounds: int) -> dict[str, Any]:
    """Run every cell on every gateway in turn, ``rounds`` times; medians by cell and gateway."""
    runs = measure_each(chosen, directory, rounds)
    return {
        "machine": machine(),
        "rounds": rounds,
        "tokens": TOKENS,
        "gateways": {peer.name: peer.what for peer in chosen},
        "cells": {cell: {name: _medians(many) for name, many in by.items()} for cell, by in runs.items()},
    }


def measure_each(chosen: list[Peer], directory: Path, rounds: int) -> dict[str, dict[str, list[Figures]]]:
    """The figures of each round, by cell and gateway."""
    runs: dict[str, dict[str, list[Figures]]] = {}
    compile_programs(directory)
    bodies = write_bodies(directory)
    stage_ports = free_ports(6)
    stages = Stages(encode=stage_ports[:2], prefill=stage_ports[2:4], decode=stage_ports[4:])
    write_answers(directory, stages.all)
    with ExitStack() as stack:
        command = [str(directory / "stage"), str(directory), str(TOKENS)]
        stack.enter_context(
            running([*command, *(f"{role}:{port}" for role, port in stages.all)], directory / "stage.log")
        )
        running_peers: dict[str, tuple[int, psutil.Process | None]] = {DIRECT: (stages.decode[0], None)}
        for peer in chosen:
            [port] = free_ports(1)
            log = directory / f"{peer.name}.log"
            tree = stack.enter_context(running(peer.command(stages, port, directory), log))
            wait_until_served(port, bodies["1 image"].read_bytes(), log)
            running_peers[peer.name] = (port, tree)
        for number in range(rounds):
            for cell in CELLS:
                for name, (port, tree) in running_peers.items():
                    _set_gap(stages.decode[0], cell.gap_ms)
                    figures = _run(cell, port, tree, directory, bodies[cell.body])
                    runs.setdefault(cell.name, {}).setdefault(name, []).append(figures)
                    _progress(number, cell, name, figures)
    return runs


def _run(cell: Cell, port: int, tree: psutil.Process | None, directory: Path, body: Path) -> Figures:
    before = None if tree is None else usage(tree)
    seen = load(directory / "load", port, body, cell.connections, cell.seconds, TOKENS, cell.rate)
    if seen["failed"]:
        print(f"{cell.name}: {seen['failed']} requests failed, the first with {seen['failure']}", file=sys.stderr)
    figures = {
        "requests": float(seen["ok"]),
        "failed": float(seen["failed"]),
        "unsent": float(seen["unsent"]),
        "requests_per_s": seen["ok"] / seen["seconds"],
        "most_in_flight": float(seen["most_in_flight"]),
        **{
            name: seen[name]
            for name in ("ttft_p50_ms", "ttft_p99_ms", "latency_p50_ms", "delay_p50_ms", "delay_p99_ms")
        },
    }
    if tree is not None and before is not None:
        after = usage(tree)
        figures["cpu_ms"] = 1000 * (after.cpu_s - before.cpu_s) / max(1, seen["ok"])
        figures["rss_mib"] = after.rss_bytes / 2**20
    return figures


def _medians(many: list[Figures]) -> Figures:
    return {name: round(statistics.median(one[name] for one in many), 4) for name in many[0]}


def _set_gap(port: int, gap_ms: int) -> None:
    urllib.request.urlopen(f"http://127.0.0.1:{port}/gap/{gap_ms}").read()


def _progress(number: int, cell: Cell, name: str, figures: Figures) -> None:
    cpu = f"{figures['cpu_ms']:.3f} ms CPU" if "cpu_ms" in figures else ""
    print(
        f"round {number + 1}  {cell.name:32} {name:12} {figures['requests']:6.0f} requests  {cpu:15}"
        f" TTFT {figures['ttft_p50_ms']:.2f} ms, token delay p99 {figures['delay_p99_ms']:.1f} ms",
        file=sys.stderr,
        flush=True,
    )


DIRECT = "direct"


def table(report: dict[str, Any]) -> str:
    """Return tables of CPU, time to first token, token delay, lost requests and memory."""
    names = list(report["gateways"])
    cells = [cell for cell in CELLS if cell.name in report["cells"]]

    def figure(cell: Cell, name: str, what: str) -> float | None:
        value = report["cells"][cell.name].get(name, {}).get(what)
        return None if value is None else float(value)

    def added(cell: Cell, name: str) -> float | None:
        own, direct = figure(cell, name, "ttft_p50_ms"), figure(cell, DIRECT, "ttft_p50_ms")
        return None if own is None or direct is None else own - direct

    lines = [
        f"{report['machine']}; {report['tokens']} tokens a stream, median of {report['rounds']} interleaved rounds"
    ]
    lines += ["", *(f"* `{name}`: {what}" for name, what in report["gateways"].items())]

    def section(title: str, chosen: list[Cell], value: Callable[[Cell, str], float | None]) -> None:
        if chosen:
            lines.extend(
                ["", f"**{title}**", "", f"| load | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
            )
        for cell in chosen:
            lines.append(f"| {cell.name} | {' | '.join(_number(value(cell, name)) for name in names)} |")

    section(
        "CPU per request of the gateway's processes, ms",
        [cell for cell in cells if cell.connections > 1],
        lambda cell, name: figure(cell, name, "cpu_ms"),
    )
    section(
        "Added time to first token, p50, one request at a time, ms",
        [cell for cell in cells if cell.connections == 1],
        added,
    )
    section(
        "Token delay p99 (from the instance's send to the client's receipt), ms",
        [cell for cell in cells if cell.gap_ms],
        lambda cell, name: figure(cell, name, "delay_p99_ms"),
    )
    for what, title in (
        ("failed", "Requests that failed"),
        ("unsent", "Requests that the load generator could not send: all its connections waited for answers"),
    ):
        lost = [cell for cell in cells if any(figure(cell, name, what) for name in names)]
        section(title, lost, lambda cell, name, what=what: figure(cell, name, what))
    peak = {name: max((figure(cell, name, "rss_mib") or 0) for cell in cells) for name in names}
    lines += ["", "**Resident memory, MiB**", "", ", ".join(f"{name} {value:.0f}" for name, value in peak.items())]
    return "\n".join(lines) + "\n"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if abs(value) < 1 else f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"


if __name__ == "__main__":
    main()
