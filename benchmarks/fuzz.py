"""Broken requests at the gateway, and broken frames at instances and at a data port, beside a neighbour.

    python -m benchmarks.fuzz [--requests 100000] [--frames 100000] [--seed 0]

Each request must get an answer or a clear 4xx. While the input comes, one client, a process of its own, asks for a
token four times a second; its latency is compared with that on the idle deployment. The exit code is 1 where an
answer was no answer, a process was restarted, something was held in the end or the data port no longer serves its
region.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from benchmarks.broken import broken_request, find_problem, send_frames, valid_bodies
from benchmarks.common import ROOT, argument_parser, machine, typed, write
from benchmarks.deployed import held_in
from epd_serve.config import DeploymentConfig
from epd_serve.launch.deployment import LocalDeployment
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.verify.client import CHAT, Client, Reply

_BODY = b'{"messages": [{"role": "user", "content": "How many apples?"}], "max_tokens": 1}'
_PERIOD_S, _IDLE_S = 0.25, 10.0


async def neighbour(url: str) -> list[float]:
    """Return the latencies in seconds of valid requests until SIGTERM."""
    client, found, end = Client(url), list[float](), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end.set)
    while not end.is_set():
        reply, since_s = Reply(), time.monotonic()
        await client.send(reply, _BODY, CHAT, 60.0)
        if reply.status != 200:
            raise RuntimeError(f"the neighbour got {reply.status}: {reply.body[:200]!r} {reply.failure}")
        found.append(time.monotonic() - since_s)
        if len(found) == 1:
            print(flush=True)  # it has begun
        await asyncio.sleep(_PERIOD_S)
    await client.close()
    return found


async def beside(url: str, work: Callable[[], Awaitable[Any]]) -> dict[str, float]:
    """Return the neighbour's latencies during some work."""
    command = [sys.executable, "-m", "benchmarks.fuzz", "--neighbour", url]
    asking = await asyncio.create_subprocess_exec(*command, stdout=PIPE, cwd=ROOT)
    assert asking.stdout is not None
    await asking.stdout.readline()
    await work()
    asking.terminate()
    said, _ = await asking.communicate()
    return latency(json.loads(said))


async def attacked(url: str, send: Callable[[int], Awaitable[None]], count: int) -> dict[str, Any]:
    """Send numbered input, four at a time, and return the neighbour's latencies."""
    numbers, since_s = iter(range(count)), time.monotonic()

    async def work() -> None:
        for number in numbers:
            await send(number)

    found = await beside(url, lambda: asyncio.gather(*[work() for _ in range(4)]))
    return {"count": count, "seconds": round(time.monotonic() - since_s, 1), "neighbour": found}


def latency(seconds: list[float]) -> dict[str, float]:
    if len(seconds) < 2:
        return {}
    p99 = statistics.quantiles(seconds, n=100, method="inclusive")[98]
    return {"p50_ms": round(1e3 * statistics.median(seconds), 1), "p99_ms": round(1e3 * p99, 1)}


async def run(topology: str, num_requests: int, num_frames: int, seed: int) -> dict[str, Any]:
    rng, problems = random.Random(seed), list[str]()
    config = DeploymentConfig(topology=topology, gateway={"port": 0}, instances={"base_port": 0})
    async with LocalDeployment(config) as deployment:
        client = Client(deployment.gateway_url)
        await client.meet()
        valid = valid_bodies(client.model)
        ports = [urlsplit(one.url).port or 0 for one in deployment.instances.values()]
        url = deployment.gateway_url
        report: dict[str, Any] = {"idle": await beside(url, partial(asyncio.sleep, _IDLE_S))}

        async def send_request(_: int) -> None:
            path, body = broken_request(rng, valid)
            if problem := await find_problem(client, path, body):
                problems.append(f"{problem}: {path} {body[:300]!r}")

        async def send_to_instance(number: int) -> None:
            await send_frames("instance", "127.0.0.1", ports[number % len(ports)], rng)

        report["requests"] = await attacked(url, send_request, num_requests)
        report["frames at instances"] = await attacked(url, send_to_instance, num_frames)
        held = await held_in(deployment)
        restarts = sum(one.num_restarts for one in deployment.processes)
        owner, reader = EmbeddedTransport(path="tcp"), EmbeddedTransport(path="tcp")
        slab = owner.allocate("fuzz", 1 << 16)
        slab.buffer[:] = rng.randbytes(1 << 16)
        port, there = slab.region.port, bytearray(1 << 16)

        async def send_to_data_port(_: int) -> None:
            await send_frames("data", "127.0.0.1", port, rng)

        report["frames at a data port"] = await attacked(url, send_to_data_port, num_frames)
        await asyncio.to_thread(reader.read, slab.region, [(0, memoryview(there))])
        if there != bytes(slab.buffer):
            problems.append("the data port serves other bytes than those of its region")
        reader.close()
        owner.close()
        await client.close()
    return {
        "command": typed("fuzz"),
        "machine": machine(),
        "topology": topology,
        "passed": not (problems or held or restarts),
        "problems": problems[:20],
        "num_problems": len(problems),
        "restarts": restarts,
        "held": held,
        **report,
    }


def main() -> int:
    parser = argument_parser(__doc__, "fuzz-cpu.json")
    parser.add_argument("--topology", default="E-P-D")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument(
        "--frames", type=int, default=100_000, help="connections with broken frames, at each place"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--neighbour", metavar="URL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.neighbour:
        print(json.dumps(asyncio.run(neighbour(options.neighbour))))
        return 0
    report = asyncio.run(run(options.topology, options.requests, options.frames, options.seed))
    print(write(options.output, report))
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
