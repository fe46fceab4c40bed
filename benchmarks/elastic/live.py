"""EPD's table 6 with eight processes, each a device of a fifth of a core: with the controller and without it.

The kernel's bandwidth control gives an instance :data:`CORES` of a core, for all that its process does, from when
it is ready to the end. So one more decode instance is more to decode with, as a GPU is, although the machine has
fewer cores than there are instances; what they leave is for the gateway and for the clients. The rate is found by
measuring: what is asked for behind the change is :data:`OVERLOAD` times what the first decode instances can give.
The controller is told neither the change nor a layout.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil

from benchmarks.deployed import Timing, ask, closed_loop, machine
from benchmarks.elastic.figures import ratios, summary, tpot_s
from benchmarks.elastic.plots import Span
from benchmarks.elastic.quotas import PERIOD_US, limited
from benchmarks.elastic.roles import Watcher
from benchmarks.elastic.shifts import TTFT_SLO_S, Phase, Shift, body, config
from benchmarks.transfer_models import make_model
from epd_serve.config import DeploymentConfig
from epd_serve.launch import LocalDeployment
from epd_serve.launch.ports import free_port

PATH = "/v1/chat/completions"
CORES = 0.2
OVERLOAD = 1.8
#: Between two tokens, in times of what it takes where nobody else is served.
TPOT_SLO = 3.0
_CROWD = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """The rates of one instance of each role with its part of a core.

    Attributes:
        ttft_s, tpot_s: of one request alone.
        decodes_per_s: answers behind the change that one decode instance can give, :data:`_CROWD` at once.
    """

    ttft_s: float
    tpot_s: float
    decodes_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """``spans``: roles over time, in seconds since the first request could come."""

    figures: dict[str, Any]
    spans: list[Span]


def model(path: Path) -> Path:
    """Small enough for a core's own cache."""
    return make_model(
        path,
        hidden=256,
        layers=6,
        heads=8,
        kv_heads=4,
        intermediate=768,
        vision_layers=4,
        vision_hidden=256,
    )


@asynccontextmanager
async def devices(settings: DeploymentConfig) -> AsyncIterator[LocalDeployment]:
    """A deployment that is ready, each instance with its part of a core."""
    async with LocalDeployment(settings, ready_timeout_s=300) as deployment:
        with limited({name: one.pid for name, one in deployment.instances.items()}, CORES):
            yield deployment


async def find_pace(path: Path, shift: Shift) -> Pace:
    """Capacities of this machine as it is now."""
    first = Phase(num_tokens=50, side=shift.before.side)
    # Without pictures: behind these, the first answer would be over before the last one begins.
    text = Phase(num_tokens=150, side=0)

    async def many(url: str, begin: int, num: int, phase: Phase, at_once: int) -> list[Timing]:
        return await closed_loop(url, PATH, [body(begin + number, phase) for number in range(num)], at_once)

    settings = config(path, "E-P-D", free_port("127.0.0.1"), 1.0, controlled=False)
    async with devices(settings) as deployment:
        url = deployment.gateway_url
        await many(url, 10_000, 2, first, 1)
        alone = await many(url, 10_100, 4, first, 1)
        crowd = await many(url, 10_200, _CROWD, text, _CROWD)
    return Pace(
        ttft_s=median(one.first_s for one in alone),
        tpot_s=median(tpot_s(one, first.num_tokens) for one in alone),
        decodes_per_s=together_per_s(crowd) / shift.after.num_tokens,
    )


def together_per_s(crowd: Sequence[Timing]) -> float:
    """Tokens a second while all were decoded, of requests that were sent at once."""
    begin, end = max(one.first_s for one in crowd), min(one.tokens_s[-1] for one in crowd)
    if begin >= end:
        raise RuntimeError("an answer ended before the last one began: they were never decoded together")
    return sum(begin < at_s <= end for one in crowd for at_s in one.tokens_s) / (end - begin)


async def send(
    url: str, bodies: Sequence[dict[str, Any]], arrivals_s: Sequence[float]
) -> list[Timing | Exception]:
    """Each request at its time; what became of it."""

    async def later(client: httpx.AsyncClient, one: dict[str, Any], at_s: float) -> Timing | Exception:
        await asyncio.sleep(at_s)
        try:
            return await ask(client, PATH, one)
        except (httpx.HTTPError, RuntimeError) as error:
            return error

    async with httpx.AsyncClient(base_url=url, timeout=900, limits=httpx.Limits(max_connections=None)) as client:
        return await asyncio.gather(*(later(client, *each) for each in zip(bodies, arrivals_s, strict=True)))


async def run(path: Path, shift: Shift, tpot_slo_s: float, arrivals_s: Sequence[float], controlled: bool) -> Run:
    """All requests, in a deployment of its own."""
    phases = shift.phases(len(arrivals_s))
    port = free_port("127.0.0.1")
    async with devices(config(path, shift.start, port, tpot_slo_s, controlled=controlled)) as deployment:
        url = deployment.gateway_url
        await closed_loop(url, PATH, [body(20_000 + number, shift.before) for number in range(8)], 2)
        watcher = Watcher({name: one.url for name, one in deployment.instances.items()})
        used = cpu_s(deployment)
        began, wall_s = time.monotonic(), time.time()
        async with watcher.watching():
            bodies = [body(number, phase) for number, phase in enumerate(phases)]
            outcomes = await send(url, bodies, arrivals_s)
            seconds = time.monotonic() - began
            used = {name: (spent - used[name]) / seconds for name, spent in cpu_s(deployment).items()}
        async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
            decisions = (await client.get(f"http://127.0.0.1:{port}/elastic")).json()["decisions"] or ()
            held = await held_at_the_end(client, deployment)
    figures = {
        **summary(outcomes, [phase.num_tokens for phase in phases]),
        "seconds": seconds,
        "cores_used": used,
        "held_at_the_end": held,
        "end": watcher.layout(),
        "switches": [
            {"at_s": one["time"] - wall_s, "reason": one["reason"]}
            for one in decisions
            if one["order"] is not None
        ],
    }
    return Run(figures=figures, spans=watcher.spans(seconds))


def cpu_s(deployment: LocalDeployment) -> dict[str, float]:
    """Seconds of a core that instances, the gateway and this process have used so far."""
    pids = [one.pid for one in deployment.instances.values()]
    gateways = [one.pid for one in deployment.processes if one.pid not in pids]
    groups = {"instances": pids, "gateway": gateways, "clients": [os.getpid()]}
    return {name: sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in those) for name, those in groups.items()}


async def held_at_the_end(client: httpx.AsyncClient, deployment: LocalDeployment) -> dict[str, Any]:
    """Things that instances hold once all is answered, thirty seconds later at most; {} for nothing."""
    deadline = time.monotonic() + 30
    while True:
        answers = {name: await client.get(f"{one.url}/integrity") for name, one in deployment.instances.items()}
        held = {name: answer.json() for name, answer in answers.items() if any(answer.json().values())}
        if not held or time.monotonic() > deadline:
            return held
        await asyncio.sleep(0.2)


async def row_of(shift: Shift, count: int, seed: int) -> tuple[dict[str, Any], Run, list[float]]:
    """One row; its run with switches, and when requests came.

    Both runs get the same requests at the same times; with odd seeds the one without switches is first.
    """
    with tempfile.TemporaryDirectory(prefix="epd-serve-model-") as directory:
        path = model(Path(directory) / "model")
        pace = await find_pace(path, shift)
        rate = OVERLOAD * shift.num_decodes * pace.decodes_per_s
        arrivals_s = arrivals(count, rate, seed)
        runs: dict[bool, Run] = {}
        for controlled in (seed % 2 == 0, seed % 2 == 1):
            runs[controlled] = await run(path, shift, TPOT_SLO * pace.tpot_s, arrivals_s, controlled)
    without, switched = runs[False].figures, runs[True].figures
    row = {
        "seed": seed,
        "machine": machine(),
        "shift": asdict(shift),
        "requests": count,
        "rate": rate,
        "cores_of_an_instance": CORES,
        "period_s": PERIOD_US / 1e6,
        "alone": {"ttft_s": pace.ttft_s, "tpot_s": pace.tpot_s},
        "decodes_per_s": pace.decodes_per_s,
        "overload": OVERLOAD,
        "slo": {"ttft_s": TTFT_SLO_S, "tpot_s": TPOT_SLO * pace.tpot_s},
        "ratio": ratios(without, switched),
        "with": switched,
        "without": without,
    }
    return row, runs[True], arrivals_s


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds at which requests come, with exponential gaps."""
    draw = random.Random(seed)
    at_s, found = 0.0, []
    for _ in range(count):
        at_s += draw.expovariate(rate)
        found.append(at_s)
    return found
