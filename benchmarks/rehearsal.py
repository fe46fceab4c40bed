"""The host's part of a rehearsal: many instances of a model without weights on emulated devices, on two cores.

Starts 32 instances and their gateway, says what memory and idle CPU they take, and asks with ever more clients at
once until more clients get no more answers: the rate at which this host, not an emulated device, is the limit.
Clients run on the same cores. Run as ``python -m benchmarks.rehearsal`` from the root of the repository.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import psutil
from rich.console import Console

from benchmarks.common import RESULTS, argument_parser, machine, write
from epd_serve.config import DeploymentConfig
from epd_serve.launch.deployment import LocalDeployment

RESULT = RESULTS / "rehearsal-cpu.json"
TOPOLOGY = "8E-8P-16D"
DEVICES = "emulated:h200 x 32"
MODEL = "qwen2.5-vl-7b"
#: Tokens of a prompt, about, and of an answer.
PROMPT, ANSWER = "words of a question " * 20, 32


def memory(processes: Mapping[str, psutil.Process]) -> dict[str, Any]:
    """MiB that each has resident, and that all have together, what they share counted once."""
    resident = [one.memory_info().rss / 2**20 for one in processes.values()]
    return {
        "median_rss_mib": round(median(resident), 1),
        "largest_rss_mib": round(max(resident), 1),
        "together_mib": round(sum(one.memory_full_info().pss for one in processes.values()) / 2**20),
    }


def cpu_s(processes: Mapping[str, psutil.Process]) -> float:
    return sum(sum(one.cpu_times()[:2]) for one in processes.values())


async def ask(session: aiohttp.ClientSession, url: str, seconds: float, clients: int) -> list[float]:
    """Seconds of each whole answer, asked by so many clients, each for its next when it has one."""
    took: list[float] = []
    until = time.monotonic() + seconds

    async def client(number: int) -> None:
        asked = 0
        while time.monotonic() < until:
            began = time.monotonic()
            text = f"{number} {asked} {PROMPT}"
            body = {"model": MODEL, "prompt": text, "max_tokens": ANSWER, "ignore_eos": True, "stream": True}
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                assert (await answer.read()).endswith(b"data: [DONE]\n\n")
            took.append(time.monotonic() - began)
            asked += 1

    await asyncio.gather(*map(client, range(clients)))
    return took


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    config = DeploymentConfig.model_validate(
        {
            "topology": TOPOLOGY,
            "model": {"shape_of": MODEL},
            "devices": [DEVICES],
            "gateway": {"port": 0},
        }
    )
    load = psutil.getloadavg()[0]
    began = time.monotonic()
    async with LocalDeployment(config, ready_timeout_s=300) as deployment, aiohttp.ClientSession() as session:
        ready_s = time.monotonic() - began
        instances = {name: psutil.Process(one.pid) for name, one in deployment.instances.items()}
        gateway = {
            process.spec.name: psutil.Process(process.pid)
            for process in deployment.processes
            if process.spec.name == "gateway"
        }
        await asyncio.sleep(5)
        at_start = memory(instances)
        before = cpu_s(instances), cpu_s(gateway)
        await asyncio.sleep(arguments.seconds)
        idle = [
            100 * (cpu_s(those) - had) / arguments.seconds
            for those, had in zip((instances, gateway), before, strict=True)
        ]
        steps: list[dict[str, Any]] = []
        for clients in arguments.clients:
            before = cpu_s(instances), cpu_s(gateway)
            took = await ask(session, deployment.gateway_url, arguments.seconds, clients)
            used = [cpu_s(those) - had for those, had in zip((instances, gateway), before, strict=True)]
            steps.append(
                {
                    "clients": clients,
                    "requests_per_s": round(len(took) / arguments.seconds, 1),
                    "tokens_per_s": round(len(took) * ANSWER / arguments.seconds),
                    "median_s": round(median(took), 3),
                    "cpu_ms_per_request": {
                        "instances": round(1e3 * used[0] / len(took), 1),
                        "gateway": round(1e3 * used[1] / len(took), 1),
                    },
                }
            )
        in_the_end = memory(instances)
    return {
        "command": "python -m benchmarks.rehearsal",
        "machine": machine(),
        "emulated": f"{DEVICES}: {MODEL} without weights; nothing is computed",
        "topology": TOPOLOGY,
        "cores": len(os.sched_getaffinity(0)),
        "load_average_before": round(load, 1),
        "seconds_until_ready": round(ready_s, 1),
        "memory_of_instances": {"at_start": at_start, "after_the_load": in_the_end},
        "idle_cpu_percent_of_a_core": {"instances": round(idle[0], 1), "gateway": round(idle[1], 1)},
        "load": steps,
        "most_requests_per_s": max(one["requests_per_s"] for one in steps),
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    report = asyncio.run(run(arguments))
    write(arguments.output, report)
    Console().print_json(data=report)


if __name__ == "__main__":
    main()
