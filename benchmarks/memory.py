"""Resident memory of E, P and D over 20 minutes of a load whose pictures and questions are always new.

Run as ``python -m benchmarks.memory [--minutes 20] [--rate 1.5]`` from the root of the repository. The deployment
is the built-in one with its default pools; each five minutes have another seed of the workload. ``flat`` says how
much each instance grew from minute 5 to the end.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.common import RESULTS, argument_parser, machine, write
from epd_serve.config import DeploymentConfig, change_config
from epd_serve.launch.deployment import LocalDeployment

RESULT = RESULTS / "memory-cpu.json"
MIB = 1 << 20
PART_S = 300


async def load(url: str, rate: float, seed: int, seconds: float) -> str:
    """One run of ``epd-serve bench``; returns the last line of its progress."""
    program = str(Path(sys.executable).with_name("epd-serve"))
    command = [program, "bench", "--base-url", url, "--workload", "sharegpt4o-like"]
    command += ["--rates", str(rate), "--num-requests", str(round(rate * seconds)), "--seed", str(seed)]
    bench = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output = (await bench.communicate())[0].decode()
    if bench.returncode:
        raise SystemExit(output)
    return next((line for line in reversed(output.splitlines()) if "FINISH=" in line), "").strip()


async def measure(rate: float, minutes: float) -> dict[str, Any]:
    config = change_config(DeploymentConfig(), {"gateway": {"port": 0}, "instances": {"base_port": 0}})
    samples: list[dict[str, Any]] = []
    async with LocalDeployment(config, ready_timeout_s=120) as deployment:
        started = time.monotonic()

        async def sample() -> None:
            while True:
                memory = {
                    name: psutil.Process(one.pid).memory_full_info() for name, one in deployment.instances.items()
                }
                samples.append(
                    {
                        "at_s": round(time.monotonic() - started),
                        "rss_mib": {name: usage.rss // MIB for name, usage in memory.items()},
                        "pss_mib": {name: usage.pss // MIB for name, usage in memory.items()},
                    }
                )
                await asyncio.sleep(15)

        sampling = asyncio.create_task(sample())
        runs: list[str] = []
        while (left := 60 * minutes - (time.monotonic() - started)) > 1:
            runs.append(await load(deployment.gateway_url, rate, len(runs), min(PART_S, left)))
        sampling.cancel()
    return {"runs": runs, "samples": samples}


def grown(samples: list[dict[str, Any]], start_s: float) -> dict[str, int]:
    """MiB by which each instance's resident memory grew between two medians of five samples."""
    behind = [one for one in samples if one["at_s"] >= start_s]

    def median(part: list[dict[str, Any]], name: str) -> int:
        return int(sorted(one["rss_mib"][name] for one in part)[len(part) // 2])

    return {name: median(behind[-5:], name) - median(behind[:5], name) for name in samples[0]["rss_mib"]}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--rate", type=float, default=1.5)
    arguments = parser.parse_args()
    if arguments.minutes < 8:
        parser.error("what happens behind minute 5 takes 8 minutes at least")
    result = asyncio.run(measure(arguments.rate, arguments.minutes))
    samples = result["samples"]
    result = {"machine": machine(), "rate": arguments.rate, "flat": grown(samples, PART_S), **result}
    write(RESULT, result)
    names = list(samples[0]["rss_mib"])
    table = Table("minute", *(f"{name} RSS MiB" for name in names))
    for minute in range(round(samples[-1]["at_s"] / 60) + 1):
        at = min(samples, key=lambda one: abs(one["at_s"] - 60 * minute))
        table.add_row(str(minute), *(str(at["rss_mib"][name]) for name in names))
    Console(width=100).print(f"{machine()}; grown after minute 5: {result['flat']} MiB", table)


if __name__ == "__main__":
    main()
