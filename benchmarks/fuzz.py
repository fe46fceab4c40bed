"""Thousands of broken requests against a real deployment: no 5xx, no hang, no leak.

    python -m benchmarks.fuzz --cases 20000 --output benchmarks/results/fuzz.json

Every answer is checked: its status, that it is JSON (or a stream with an end) and that errors have OpenAI's shape.
Afterwards the deployment must be idle, its books balanced, valid requests answered as before, and its processes no
larger than after the first tenth of the cases, within a margin.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.deployed import machine
from benchmarks.fuzz_cases import Case, Fuzzer, answer_problem, valid_bodies
from epd_serve.config import DeploymentConfig
from epd_serve.launch import LocalDeployment

HANG_S = 60.0
#: Allocators keep what they once had; a leak of one small body a case would be more.
GROWTH_BYTES = 64 << 20


@dataclass
class Findings:
    statuses: Counter[str] = field(default_factory=Counter)
    problems: list[dict[str, str]] = field(default_factory=list)
    slowest_s: float = 0.0
    num_unsendable: int = 0


async def send(session: aiohttp.ClientSession, url: str, case: Case, found: Findings) -> None:
    start = time.monotonic()
    headers = {"content-type": "application/json", **case.headers}
    try:
        async with asyncio.timeout(HANG_S):
            async with session.post(url + case.path, data=case.body, headers=headers) as response:
                answer = await response.read()
                problem = answer_problem(response.status, response.content_type, answer)
                found.statuses[str(response.status)] += 1
    except ValueError:  # a header that the client does not send
        found.num_unsendable += 1
        return
    except TimeoutError:
        problem, answer = f"no answer in {HANG_S:g} s", b""
    except aiohttp.ClientError as error:
        problem, answer = f"a broken connection: {error}", b""
    found.slowest_s = max(found.slowest_s, time.monotonic() - start)
    if problem:
        body = case.body[:2000].decode("utf-8", "replace")
        found.problems.append(
            {
                "problem": problem,
                "path": case.path,
                "body": body,
                "answer": answer[:500].decode("utf-8", "replace"),
            }
        )


async def run_cases(url: str, fuzzer: Fuzzer, count: int, concurrency: int, found: Findings) -> None:
    remaining = iter(range(count))

    async def work(session: aiohttp.ClientSession) -> None:
        for _ in remaining:
            await send(session, url, fuzzer.case(), found)

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work(session))


async def check_valid(url: str) -> list[str]:
    """Faults in the answers to valid requests."""
    wrong = []
    async with aiohttp.ClientSession() as session:
        for path, body in valid_bodies():
            async with session.post(url + path, json=body) as response:
                problem = answer_problem(response.status, response.content_type, await response.read())
                if problem or response.status != 200:
                    wrong.append(f"{path}: {response.status} {problem}")
    return wrong


async def in_use(deployment: LocalDeployment, timeout_s: float = 60) -> dict[str, Any]:
    """Things that instances still hold when nothing is going on; {} after all of it has come back."""
    deadline = time.monotonic() + timeout_s
    async with aiohttp.ClientSession() as session:
        while True:
            held: dict[str, Any] = {}
            for name, instance in deployment.instances.items():
                async with session.get(f"{instance.url}/integrity") as response:
                    state = await response.json(content_type=None)
                    if response.status != 200 or any(state.values()):
                        held[name] = state
            if not held or time.monotonic() > deadline:
                return held
            await asyncio.sleep(0.2)


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
    found, fuzzer, start = Findings(), Fuzzer(seed), time.monotonic()
    async with LocalDeployment(config, ready_timeout_s=300) as deployment:
        wrong_before = await check_valid(deployment.gateway_url)
        warm = count // 10
        await run_cases(deployment.gateway_url, fuzzer, warm, concurrency, found)
        before = sizes_bytes()
        await run_cases(deployment.gateway_url, fuzzer, count - warm, concurrency, found)
        held = await in_use(deployment)
        after = sizes_bytes()
        wrong_after = await check_valid(deployment.gateway_url)
    growth = {str(pid): after[pid] - size for pid, size in before.items() if pid in after}
    return {
        "command": f"python -m benchmarks.fuzz --cases {count} --concurrency {concurrency} --seed {seed}",
        "machine": machine(),
        "cases": count,
        "seconds": round(time.monotonic() - start, 1),
        "statuses": dict(sorted(found.statuses.items())),
        "unsendable": found.num_unsendable,
        "slowest_s": round(found.slowest_s, 2),
        "problems": found.problems[:50],
        "num_problems": len(found.problems),
        "valid_requests_wrong": [*wrong_before, *wrong_after],
        "still_in_use": held,
        "processes_lost": len(set(before) - set(after)),
        "growth_bytes": growth,
        "growth_limit_bytes": GROWTH_BYTES,
    }


def is_clean(result: dict[str, Any]) -> bool:
    return (
        result["num_problems"] == 0
        and not result["valid_requests_wrong"]
        and not result["still_in_use"]
        and result["processes_lost"] == 0
        and max(result["growth_bytes"].values(), default=0) <= result["growth_limit_bytes"]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
