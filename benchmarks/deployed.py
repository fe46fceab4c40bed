"""The common part of benchmarks of a whole deployment: starting it, its metrics, and requests with their times."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.ablations.processes import ablated
from epd_serve.config import DeploymentConfig
from epd_serve.launch.deployment import LocalDeployment

Figures = dict[str, float]
_PREFIX = "epd_serve_instance_"


@asynccontextmanager
async def deployed(
    topology: str,
    model: Path,
    instances: dict[str, Any],
    *,
    dtype: str = "float32",
    baselines: Mapping[str, Any] | None = None,
    slo: dict[str, float] | None = None,
) -> AsyncIterator[LocalDeployment]:
    """A deployment on free ports; one compute thread for each instance unless ``instances`` says more.

    ``baselines``: see :func:`benchmarks.ablations.processes.use`.
    """
    config = DeploymentConfig(
        topology=topology,
        model=str(model),
        served_model_name="benchmark",
        dtype=dtype,
        gateway={"port": 0},
        slo=slo or {},
        instances={"base_port": 0, "threads": 1, **instances},
    )
    with ablated(**(baselines or {})):
        made = LocalDeployment(config, ready_timeout_s=300)
    async with made as deployment:
        yield deployment


async def figures(deployment: LocalDeployment, name: str) -> Figures:
    """An instance's counters as of now, each summed over its labels; with one label also ``name:value``."""
    async with httpx.AsyncClient(timeout=60) as client:
        text = (await client.get(f"{deployment.instances[name].url}/metrics")).text
    sums: Figures = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith(("_bucket", "_created")):
                continue
            key = sample.name.removeprefix(_PREFIX)
            sums[key] = sums.get(key, 0.0) + sample.value
            if len(sample.labels) == 1:
                (value,) = sample.labels.values()
                sums[f"{key}:{value}"] = sample.value
    return sums


def growth(before: Figures, after: Figures) -> Figures:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


async def held_in(deployment: LocalDeployment, timeout_s: float = 60) -> dict[str, Any]:
    """Things that instances still hold when nothing is going on; {} after all of it has come back."""
    deadline = time.monotonic() + timeout_s
    async with httpx.AsyncClient(timeout=timeout_s, trust_env=False) as client:
        while True:
            held: dict[str, Any] = {}
            for name, instance in deployment.instances.items():
                answer = await client.get(f"{instance.url}/integrity")
                if answer.status_code != 200 or any(answer.json().values()):
                    held[name] = answer.json()
            if not held or time.monotonic() > deadline:
                return held
            await asyncio.sleep(0.2)


def descriptors(deployment: LocalDeployment) -> dict[str, int]:
    """Return each process's open descriptors, except one connection to each live peer and that peer's memory.

    Those increase until each process has met each other.
    """
    total, links, memory = dict[str, int](), dict[str, list[Any]](), dict[str, Counter[str]]()
    for process in deployment.processes:
        name, folder = process.spec.name, Path(f"/proc/{process.pid}/fd")
        open_files = Counter[str]()
        for file in folder.iterdir():
            with suppress(FileNotFoundError):
                open_files[str(file.readlink())] += 1
        total[name] = open_files.total()
        links[name] = [(one.laddr, one.raddr) for one in psutil.Process(process.pid).net_connections("tcp")]
        memory[name] = Counter({one: count for one, count in open_files.items() if one.startswith("/memfd:")})
    ends = {end: name for name, found in links.items() for end in found}
    # its owner holds it twice: as a descriptor and as a mapping
    live = {one for found in memory.values() for one, count in found.items() if count > 1}
    return {
        name: count - len({ends.get(end[::-1]) for end in links[name]} - {None}) - len(live & memory[name].keys())
        for name, count in total.items()
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds since the request was sent, for each token."""

    tokens_s: list[float]

    @property
    def first_s(self) -> float:
        """To the first token, which the prefill instance makes."""
        return self.tokens_s[0]

    @property
    def second_s(self) -> float:
        """To the first token that the decode instance makes."""
        return self.tokens_s[1]


async def ask(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Timing:
    """One streamed request. Raises RuntimeError for any answer that is not complete."""
    times: list[float] = []
    last = ""
    start = time.perf_counter()
    async with client.stream("POST", path, json={**body, "model": "benchmark", "stream": True}) as answer:
        async for line in answer.aiter_lines():
            last = line
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            times.append(time.perf_counter() - start)
    if answer.status_code != 200 or len(times) < 2:
        raise RuntimeError(f"status {answer.status_code}, {len(times)} tokens: {last}")
    return Timing(tokens_s=times)


async def closed_loop(url: str, path: str, bodies: Iterable[dict[str, Any]], concurrency: int) -> list[Timing]:
    """All requests, so many at a time."""
    waiting = iter(bodies)
    timings: list[Timing] = []

    async def work(client: httpx.AsyncClient) -> None:
        for body in waiting:
            timings.append(await ask(client, path, body))

    async with httpx.AsyncClient(base_url=url, timeout=600) as client, asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work(client))
    return timings


async def open_loop(url: str, path: str, bodies: list[dict[str, Any]], arrivals_s: list[float]) -> list[Timing]:
    """Each request at its time, whether those before it are done or not."""

    async def later(client: httpx.AsyncClient, body: dict[str, Any], at_s: float) -> Timing:
        await asyncio.sleep(at_s)
        return await ask(client, path, body)

    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        return await asyncio.gather(
            *(later(client, body, at) for body, at in zip(bodies, arrivals_s, strict=True))
        )
