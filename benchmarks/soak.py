"""A demo deployment under a steady load: does its memory, its number of descriptors or its latency grow?

    python -m benchmarks.soak [--seconds 7200] [--rate 5]

Requests are those of the chaos benchmark, each compared with the answer that the deployment gave before, and no
process is harmed. Memory (PSS, by process) is recorded every --period seconds and compared between one twelfth of
the time (its caches are full by then) and the end. The exit code is 1 where an answer was wrong or late,
something was held in the end, descriptors increased or memory grew by more than 2 %.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos import DEADLINE_S
from benchmarks.common import argument_parser, machine, typed, write
from benchmarks.deployed import held_in
from benchmarks.traffic import ask_at_times, mixed_requests, report_of
from epd_serve.config import DeploymentConfig
from epd_serve.launch.deployment import LocalDeployment
from epd_serve.verify.client import Client
from epd_serve.verify.traffic import Outcome, Request, Result, Traffic

MOST_GROWTH = 1.02


def sample(deployment: LocalDeployment) -> dict[str, dict[str, float]]:
    """Return MiB of memory and open descriptors by process, each with the processes that it started."""
    found = {}
    for process in deployment.processes:
        own = psutil.Process(process.pid)
        family = [own, *own.children(recursive=True)]
        memory = sum(one.memory_full_info().pss for one in family) / (1 << 20)
        found[process.spec.name] = {"mib": round(memory, 1), "descriptors": own.num_fds()}
    return found


def latency(results: list[Result], parts: int = 6) -> list[dict[str, float]]:
    """Return median and p99 in seconds of the complete answers, for each part of the time."""
    found = []
    size = len(results) // parts
    for start in range(0, size * parts, size):
        seconds = [one.seconds for one in results[start : start + size] if one.outcome is Outcome.IDENTICAL]
        found.append(
            {
                "p50_s": round(statistics.median(seconds), 3),
                "p99_s": round(statistics.quantiles(seconds, n=100)[98], 3),
            }
        )
    return found


async def run(
    topology: str, requests: list[Request], rate: float, seconds: float, period_s: float
) -> dict[str, Any]:
    config = DeploymentConfig(topology=topology, gateway={"port": 0}, instances={"base_port": 0})
    async with LocalDeployment(config) as deployment:
        client = Client(deployment.gateway_url)
        await client.meet()
        traffic = Traffic(client, deadline_s=DEADLINE_S)
        await traffic.learn(requests, 4)
        samples = [sample(deployment)]
        arrivals_s = [number / rate for number in range(int(rate * seconds))]
        loading = asyncio.create_task(ask_at_times(traffic, requests, arrivals_s))
        while not (await asyncio.wait([loading], timeout=period_s))[0]:
            samples.append(sample(deployment))
        await loading
        held = await held_in(deployment)
        samples.append(sample(deployment))
        await client.close()
        restarts = sum(one.num_restarts for one in deployment.processes)
    begun, last = samples[max(1, len(samples) // 12)], samples[-1]
    total = {
        when: round(sum(one["mib"] for one in each.values()), 1) for when, each in (("a", begun), ("z", last))
    }
    report = report_of(traffic)
    bad = len(report["wrong"]) + report["outcomes"][Outcome.ERROR] + restarts
    growth = round(total["z"] / total["a"], 4)
    more_descriptors = {
        name: [begun[name]["descriptors"], last[name]["descriptors"]]
        for name in last
        if last[name]["descriptors"] > begun[name]["descriptors"]
    }
    return {
        "command": typed("soak"),
        "machine": machine(),
        "topology": topology,
        "requests_per_s": rate,
        "seconds": seconds,
        "passed": not (bad or held or more_descriptors or growth > MOST_GROWTH),
        **report,
        "restarts": restarts,
        "held": held,
        "memory_mib": {"after a twelfth of the time": total["a"], "at the end": total["z"], "growth": growth},
        "descriptors_that_increased": more_descriptors,
        "latency": latency([result for _, result in traffic.results]),
        "samples": samples[:: max(1, len(samples) // 24)],
    }


def main() -> int:
    parser = argument_parser(__doc__, "soak-cpu.json")
    parser.add_argument("--topology", default="E-P-D")
    parser.add_argument("--rate", type=float, default=5.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=7200.0)
    parser.add_argument("--period", type=float, default=60.0, help="seconds between two looks at memory")
    parser.add_argument("--distinct", type=int, default=400, help="requests, which are repeated")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    output: Path = arguments.output
    report = asyncio.run(
        run(
            arguments.topology,
            mixed_requests(arguments.distinct, arguments.seed),
            arguments.rate,
            arguments.seconds,
            arguments.period,
        )
    )
    print(write(output, report))
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
