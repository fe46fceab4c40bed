"""Time until ready, memory and latency of the deployments in ``deploy/`` for CPUs, with the demo model.

Run as ``python -m benchmarks.topologies [--rounds 20] [FILE ...]`` from the root of the repository.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.common import CHAT_PATH, ROOT, argument_parser, data_url, machine, typed, user_message, write
from epd_serve.config import change_config, load_config
from epd_serve.launch.deployment import LocalDeployment

PICTURE = ROOT / "docs" / "images" / "three-shapes.png"
QUESTION, ANSWER = "Where is the blue square?", "right"
MIB = 1 << 20


async def measure(file: Path, rounds: int) -> dict[str, Any]:
    """Start one deployment and ask it the image question ``rounds`` times, one after the other."""
    config = change_config(load_config(file), {"gateway": {"port": 0}, "instances": {"base_port": 0}})
    started = time.monotonic()
    async with LocalDeployment(config, ready_timeout_s=120) as deployment:
        ready_s = time.monotonic() - started
        async with httpx.AsyncClient(base_url=deployment.gateway_url, timeout=60) as client:
            await ask(client)  # the first one warms connections and caches
            asked = [await ask(client) for _ in range(rounds)]
        memory = [psutil.Process(process.pid).memory_full_info() for process in deployment.processes]
        stopping = time.monotonic()
    return {
        "topology": str(config.topology),
        "processes": len(memory),
        "ready_s": ready_s,
        "stop_s": time.monotonic() - stopping,
        "rss_bytes": sum(usage.rss for usage in memory),
        "pss_bytes": sum(usage.pss for usage in memory),
        "correct": sum(answer == ANSWER for answer, _, _ in asked),
        "rounds": rounds,
        "ttft_ms": 1000 * statistics.median(ttft for _, ttft, _ in asked),
        "latency_ms": 1000 * statistics.median(latency for _, _, latency in asked),
    }


async def ask(client: httpx.AsyncClient) -> tuple[str, float, float]:
    """(answer, seconds to the first token, seconds to the last)."""
    body = {"model": "demo", "temperature": 0, "stream": True, "messages": [image_message()]}
    text, first = "", 0.0
    start = time.perf_counter()
    async with client.stream("POST", CHAT_PATH, json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - start
                text += json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content", "")
    return text, first, time.perf_counter() - start


def image_message() -> dict[str, Any]:
    """The README's question about its picture, as a message of a chat."""
    return user_message(QUESTION, [data_url(PICTURE.read_bytes())])


async def main() -> None:
    parser = argument_parser(__doc__, "topologies-cpu.json")
    parser.add_argument("--rounds", type=int, default=20)
    # all but Mooncake's, which needs its package
    files = sorted({*(ROOT / "deploy").glob("cpu-*.yaml")} - {ROOT / "deploy" / "cpu-mooncake.yaml"})
    parser.add_argument("files", type=Path, nargs="*", default=files)
    arguments = parser.parse_args()
    rounds: int = arguments.rounds
    rows = [await measure(file, rounds) for file in arguments.files]
    write(arguments.output, {"command": typed("topologies"), "machine": machine(), "rows": rows})
    columns = (
        "topology",
        "processes",
        "ready s",
        "stop s",
        "RSS MiB",
        "PSS MiB",
        "correct",
        "TTFT ms",
        "latency ms",
    )
    table = Table(*columns)
    for row in rows:
        table.add_row(
            row["topology"],
            str(row["processes"]),
            f"{row['ready_s']:.1f}",
            f"{row['stop_s']:.1f}",
            str(row["rss_bytes"] // MIB),
            str(row["pss_bytes"] // MIB),
            f"{row['correct']}/{row['rounds']}",
            f"{row['ttft_ms']:.0f}",
            f"{row['latency_ms']:.0f}",
        )
    Console(width=120).print(f"{machine()}; medians of {rounds} requests, one at a time", table)


if __name__ == "__main__":
    asyncio.run(main())
