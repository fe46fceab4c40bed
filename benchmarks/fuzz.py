"""Thousands of broken requests against a real deployment: no 5xx, no hang, no leak.

    python -m benchmarks.fuzz --cases 20000 --output benchmarks/results/fuzz.json

The cases and their judge are those of ``epd-serve verify --check api.fuzz``. Afterwards the deployment must be
idle, its books balanced, valid requests answered as before, and its processes no larger than after the first tenth
of the cases, within a margin.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import argument_parser, machine, typed
from benchmarks.deployed import held_in
from epd_serve.config import DeploymentConfig
from epd_serve.launch.deployment import LocalDeployment
from epd_serve.verify.client import Client
from epd_serve.verify.fuzz import Findings, Fuzzer, answered, run_cases, valid_bodies

#: Allocators keep what they once had; a leak of one small body a case would be more.
GROWTH_BYTES = 64 << 20


def sizes_bytes() -> dict[int, int]:
    """Resident memory of each process of the deployment."""
    sizes = {}
    for process in psutil.Process().children(recursive=True):
        try:
            sizes[process.pid] = process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return sizes


async def fuzz(count: int, concurrency: int, seed: int) -> dict[str, Any]:
    config = DeploymentConfig(
        topology="EP-D",
        gateway={"port": 0, "media": {"allow_private": True}},
        # a pool so small that the first tenth of the cases has touched all of it
        instances={"base_port": 0, "threads": 1, "max_model_len": 512, "num_blocks": 256},
    )
    found, start = Findings(), time.monotonic()
    async with LocalDeployment(config, ready_timeout_s=300) as deployment:
        client = Client(deployment.gateway_url)
        await client.meet()
        valid = valid_bodies(client.model)
        fuzzer, right_before = Fuzzer(seed, valid), await answered(client) == valid
        await run_cases(client, fuzzer, count // 10, found, concurrency)
        before = sizes_bytes()
        await run_cases(client, fuzzer, count - count // 10, found, concurrency)
        held, after = await held_in(deployment), sizes_bytes()
        right_after = await answered(client) == valid
        await client.close()
    return {
        "command": typed("fuzz"),
        "machine": machine(),
        "cases": count,
        "seconds": round(time.monotonic() - start, 1),
        "statuses": {str(status): number for status, number in sorted(found.statuses.items())},
        "slowest_s": round(found.slowest_s, 2),
        "problems": [
            [problem, one.path, one.body[:2000].decode(errors="replace")] for problem, one in found.problems
        ],
        "valid_requests_right": right_before and right_after,
        "still_in_use": held,
        "processes_lost": len(set(before) - set(after)),
        "growth_bytes": {str(pid): after[pid] - size for pid, size in before.items() if pid in after},
        "growth_limit_bytes": GROWTH_BYTES,
    }


def is_clean(result: dict[str, Any]) -> bool:
    return (
        not result["problems"]
        and result["valid_requests_right"]
        and not result["still_in_use"]
        and result["processes_lost"] == 0
        and max(result["growth_bytes"].values(), default=0) <= result["growth_limit_bytes"]
    )


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--concurrency", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    result = asyncio.run(fuzz(options.cases, options.concurrency, options.seed))
    text = json.dumps(result, indent=1)
    if options.output:
        options.output.write_text(text + "\n")
    print(text)
    raise SystemExit(0 if is_clean(result) else 1)


if __name__ == "__main__":
    main()
