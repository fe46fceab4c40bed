"""The cost of an idle instance's switches at the shape of a real model; first ones, which bring weights, apart.

Deployments with and without ``instances.keep_weights`` take turns; each is started anew, so that each has its
first switches. A switch's CPU seconds are those of its process, all threads together. Run as
``python -m benchmarks.first_switches`` from the root of the repository; weights are drawn once, at random.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil
from rich.console import Console

from benchmarks.common import RESULTS, argument_parser, machine, write
from benchmarks.models import SHAPES, make_shape
from epd_serve.config import DeploymentConfig
from epd_serve.launch.deployment import LocalDeployment
from epd_serve.launch.processes.ports import free_port

RESULT = RESULTS / "first-switches-cpu.json"
TOPOLOGY = "E-2P-2D"
#: In this order; p0 and d0 stay what they are, so that each stage is served.
MOVES = {"p1": ("D", "P", "E", "P", "E", "P", "D"), "e0": ("P", "E", "P"), "d1": ("E", "D", "E")}


async def time_moves(model: Path, keep: bool) -> list[dict[str, Any]]:
    """Figures of one deployment's switches."""
    port = free_port("127.0.0.1")
    config = DeploymentConfig.model_validate(
        {
            "topology": TOPOLOGY,
            "model": str(model),
            "dtype": "bfloat16",
            "gateway": {"port": 0, "admin": {"port": port}},
            "instances": {"base_port": 0, "threads": 1, "max_model_len": 2048, "keep_weights": keep},
        }
    )
    moves: list[dict[str, Any]] = []
    async with LocalDeployment(config) as deployment, httpx.AsyncClient(timeout=300, trust_env=False) as client:
        await all_ready(client, f"http://127.0.0.1:{port}/instances")
        began_with = memory_of(deployment)
        for name, roles in MOVES.items():
            process, had = psutil.Process(deployment.instances[name].pid), {name[0].upper()}
            for role in roles:
                before = sum(process.cpu_times()[:2])
                url = f"http://127.0.0.1:{port}/instances/{name}/role"
                answer = await client.post(url, json={"role": role, "deadline_s": 120})
                assert answer.status_code == 200, answer.text
                said = answer.json()
                moves.append(
                    {
                        "move": f"{said['from']} → {role}{'' if role in had else ', first'}",
                        "seconds": said["seconds"],
                        "cpu_s": sum(process.cpu_times()[:2]) - before,
                    }
                )
                had.add(role)
        moves.append({"move": "memory", "mib": [began_with, memory_of(deployment)]})
    return moves


async def all_ready(client: httpx.AsyncClient, url: str) -> None:
    """Return when the gateway knows all instances: it serves as soon as each stage has one."""
    async with asyncio.timeout(60):
        while not all(one["ready"] for one in (await client.get(url)).json()["instances"]):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def memory_of(deployment: LocalDeployment) -> int:
    """MiB of all instances; what they share counts once."""
    return sum(psutil.Process(one.pid).memory_full_info().pss for one in deployment.instances.values()) >> 20


def summary(moves: list[dict[str, Any]]) -> dict[str, Any]:
    timed: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in moves:
        timed[one["move"]].append(one)
    memory = timed.pop("memory")
    return {
        "switches": {
            name: {
                "median_s": round(median(one["seconds"] for one in all_of), 3),
                "longest_s": round(max(one["seconds"] for one in all_of), 3),
                "median_cpu_s": round(median(one["cpu_s"] for one in all_of), 2),
                "runs": len(all_of),
            }
            for name, all_of in sorted(timed.items())
        },
        "memory_at_start_mib": round(median(one["mib"][0] for one in memory)),
        "memory_in_the_end_mib": round(median(one["mib"][1] for one in memory)),
    }


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    model = make_shape(arguments.shape, arguments.models / arguments.shape)
    moves: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    load = []
    for _ in range(arguments.rounds):
        for keep, all_of in moves.items():
            load.append(psutil.getloadavg()[0])
            all_of += await time_moves(model, keep)
    return {
        "command": f"python -m benchmarks.first_switches --shape {arguments.shape} --rounds {arguments.rounds}",
        "machine": machine(),
        "topology": TOPOLOGY,
        "shape": arguments.shape,
        "dtype": "bfloat16",
        "rounds": arguments.rounds,
        "load_average": {"median": round(median(load), 1), "most": round(max(load), 1)},
        "keep_weights": summary(moves[True]),
        "without": summary(moves[False]),
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.5B")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "epd-serve-shapes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    report = asyncio.run(run(arguments))
    write(arguments.output, report)
    Console().print_json(data=report)


if __name__ == "__main__":
    main()
