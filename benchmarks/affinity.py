"""Repeated images over several encoders: how many features are found again, and how evenly the encoders work.

    python -m benchmarks.affinity [--encoders 4] [--gateways 1]

A deployment of real processes, with a random Qwen2.5-VL whose tower takes time by pixels, gets requests with one
image each: with 60 % probability one of those before, else a new one, of different sizes. *Ideal* is the share of
requests whose image came before: an encoder may compute each image once. *Imbalance* is the largest encoder's part
over the mean's, in pixels and in seconds of the tower.

``tests/routing/test_simulated.py`` compares other policies in the simulator.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import (
    CHAT_PATH,
    argument_parser,
    data_url,
    greedy_chat,
    machine,
    noise,
    typed,
    write,
)
from benchmarks.deployed import Figures, ask, deployed, figures, growth
from benchmarks.models import make_model
from epd_serve.launch.deployment import LocalDeployment
from epd_serve.launch.processes.ports import free_port

REPEATED = 0.6
#: Sides of the images, in pixels.
SIDES = (224, 336, 448, 672)


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    seed: int
    side: int

    def url(self) -> str:
        return data_url(noise(self.seed, self.side, self.side, "JPEG"), "jpeg")


def workload(num_requests: int, seed: int) -> list[Picture]:
    """One picture for each request."""
    rng, known, chosen = random.Random(seed), [], []
    for _ in range(num_requests):
        if not known or rng.random() >= REPEATED:
            known.append(Picture(seed=1000 * seed + len(known), side=rng.choice(SIDES)))
            chosen.append(known[-1])
        else:
            chosen.append(rng.choice(known))
    return chosen


def ideal_hit_rate(pictures: list[Picture]) -> float:
    return 1 - len(set(pictures)) / len(pictures)


@asynccontextmanager
async def gateways(deployment: LocalDeployment, number: int) -> AsyncIterator[list[str]]:
    """URLs of the deployment's gateway and of others beside it, which know nothing of each other."""
    urls, processes = [deployment.gateway_url], []
    try:
        for _ in range(number - 1):
            port = free_port("127.0.0.1")
            command = [sys.executable, "-m", "epd_serve.cli", "proxy", "--port", str(port)]
            for name, handle in deployment.instances.items():
                command += ["--instance", f"{name}={handle.url}"]
            processes.append(await asyncio.create_subprocess_exec(*command))
            urls.append(f"http://127.0.0.1:{port}")
        async with httpx.AsyncClient() as client:
            for url in urls:
                while not await _is_ready(client, url):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
        yield urls
    finally:
        for process in processes:
            process.terminate()
            await process.wait()


async def _is_ready(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(f"{url}/health")).status_code == 200
    except httpx.TransportError:
        return False


async def send_all(urls: list[str], pictures: list[Picture], concurrency: int) -> list[float]:
    """Seconds to the first token of each; the gateways take turns."""
    waiting = iter(enumerate(pictures))
    waits: list[float] = []

    async def work() -> None:
        for number, picture in waiting:
            timing = await ask(
                clients[number % len(clients)],
                CHAT_PATH,
                greedy_chat("What is it?", [picture.url()], max_tokens=2),
            )
            waits.append(timing.first_s)

    clients = [httpx.AsyncClient(base_url=url, timeout=120) for url in urls]
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())
    finally:
        for client in clients:
            await client.aclose()
    return sorted(waits)


async def measure(
    model: Path, num_encoders: int, num_gateways: int, pictures: list[Picture], concurrency: int
) -> dict[str, Any]:
    async with (
        deployed(f"{num_encoders}E-P-D", model, {}) as deployment,
        gateways(deployment, num_gateways) as urls,
    ):
        names = [f"e{number}" for number in range(num_encoders)]
        before = [await figures(deployment, name) for name in names]
        waits = await send_all(urls, pictures, concurrency)
        done = [growth(old, await figures(deployment, name)) for name, old in zip(names, before, strict=True)]
        async with httpx.AsyncClient() as client:
            infos = [(await client.get(f"{deployment.instances[name].url}/info")).json() for name in names]
    images = sum(one["tower_images_total"] for one in done)
    hit_rate, ideal = 1 - images / len(pictures), ideal_hit_rate(pictures)
    return {
        "encoders": num_encoders,
        "gateways": num_gateways,
        "requests": len(pictures),
        "concurrency": concurrency,
        "ideal_hit_rate": ideal,
        "hit_rate": hit_rate,
        "of_ideal": hit_rate / ideal,
        "imbalance_pixels": _imbalance(done, "tower_pixels_total"),
        "imbalance_seconds": _imbalance(done, "tower_seconds_total"),
        "pixels": [one["tower_pixels_total"] for one in done],
        "first_token_s": {"median": waits[len(waits) // 2], "p99": waits[int(0.99 * (len(waits) - 1))]},
        "rates": [info["load"]["rates"].get("E") for info in infos],
    }


def _imbalance(done: list[Figures], key: str) -> float:
    values = [one[key] for one in done]
    return max(values) * len(values) / sum(values)


def main() -> None:
    parser = argument_parser(__doc__, "affinity-cpu.json")
    parser.add_argument("--requests", type=int, default=500, help="of each run")
    parser.add_argument("--concurrency", type=int, default=8, help="requests at a time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--encoders", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--gateways", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    pictures = workload(options.requests, options.seed)
    real: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(
            Path(folder) / "model",
            hidden=64,
            layers=2,
            heads=2,
            kv_heads=1,
            intermediate=128,
            vision_layers=4,
            vision_hidden=128,
        )
        for num_encoders in options.encoders:
            for num_gateways in options.gateways:
                run = measure(model, num_encoders, num_gateways, pictures, options.concurrency)
                real.append(asyncio.run(run))
                print(_line(real[-1]))
    report = {"command": typed("affinity"), "machine": machine(), "real": real}
    write(options.output, report)


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['encoders']} E, {row['gateways']} gateways: {row['of_ideal']:.1%} of the ideal hit rate, "
        f"imbalance {row['imbalance_pixels']:.3f} (seconds {row['imbalance_seconds']:.3f})"
    )


if __name__ == "__main__":
    main()
