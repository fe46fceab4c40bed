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
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import httpx
import numpy as np
import psutil
from PIL import Image

from benchmarks.common import CHAT_PATH, data_url, encoded, greedy_chat, machine
from benchmarks.deployed import Timing, ask, closed_loop, held_in
from benchmarks.elastic.plots import DRAINING, REBUILDING, Span
from benchmarks.elastic.quotas import PERIOD_US, limited
from benchmarks.models import make_model
from epd_serve.config import DeploymentConfig
from epd_serve.launch import LocalDeployment
from epd_serve.launch.ports import free_port

TTFT_SLO_S = 2.6


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """``num_tokens``: of an answer; ``side``: of the request's square picture, in pixels; 0: it has none."""

    num_tokens: int
    side: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Shift:
    """The first tenth of the requests is ``before``, the others are ``after``.

    Attributes:
        start: the layout, made for ``before``; it has ``num_decodes`` decode instances.
    """

    start: str
    num_decodes: int
    before: Phase
    after: Phase

    def phases(self, count: int) -> list[Phase]:
        return [self.before if number < count // 10 else self.after for number in range(count)]


SHIFT = Shift(
    start="5E-P-2D",
    num_decodes=2,
    before=Phase(num_tokens=25, side=336),
    after=Phase(num_tokens=250, side=336),
)


def config(path: Path, topology: str, admin_port: int, tpot_slo_s: float, *, controlled: bool) -> DeploymentConfig:
    return DeploymentConfig.model_validate(
        {
            "topology": topology,
            "model": str(path),
            "served_model_name": "benchmark",
            "dtype": "float32",
            "gateway": {"port": 0, "admin": {"port": admin_port}, "health": {"probe_timeout_s": 60}},
            "slo": {"ttft_ms": 1e3 * TTFT_SLO_S, "tpot_ms": 1e3 * tpot_slo_s},
            "instances": {
                "base_port": 0,
                "threads": 1,
                "queue_timeout_s": 600,
                "num_blocks": 8192,
                "max_num_seqs": 256,
                "max_num_batched_tokens": 512,
                "batching": {"policy": "unlimited"},
            },
            "elastic": {"enabled": controlled, "interval_s": 0.5, "hold_s": 1.5, "cooldown_s": 3},
        }
    )


def body(number: int, phase: Phase) -> dict[str, Any]:
    """A request for a picture that no other number has."""
    urls: list[str] = []
    if phase.side:
        blocks = np.random.default_rng(number).integers(0, 256, (12, 12, 3), dtype=np.uint8)
        picture = Image.fromarray(blocks).resize((phase.side, phase.side), Image.Resampling.NEAREST)
        urls.append(data_url(encoded(picture)))
    return greedy_chat(f"Where is the blue square, {number}?", urls, max_tokens=phase.num_tokens)


PATH = CHAT_PATH
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
        held = await held_in(deployment)
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


def summary(outcomes: Sequence[Timing | Exception], lengths: Sequence[int]) -> dict[str, Any]:
    """Seconds of those that were answered, and how many were not; ``lengths``: tokens of each answer.

    Raises RuntimeError where none was answered.
    """
    answered = [(one, num) for one, num in zip(outcomes, lengths, strict=True) if isinstance(one, Timing)]
    errors = [str(one) or repr(one) for one in outcomes if isinstance(one, Exception)]
    if not answered:
        raise RuntimeError(f"none of {len(errors)} requests was answered: {errors[:1]}")
    return {
        "latency_s": spread([one.tokens_s[-1] for one, _ in answered]),
        "ttft_s": spread([one.first_s for one, _ in answered]),
        "tpot_s": spread([tpot_s(one, num) for one, num in answered]),
        "errors": len(errors),
        "first_error": errors[0] if errors else None,
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(values, (50, 99))
    return {"mean": fmean(values), "p50": float(p50), "p99": float(p99)}


def tpot_s(timing: Timing, num_tokens: int) -> float:
    """Seconds for each token of an answer: an event may carry several."""
    return (timing.tokens_s[-1] - timing.first_s) / (num_tokens - 1)


def ratios(without: dict[str, Any], switched: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Each figure without switches over the same with them."""
    return {
        name: {kind: without[name][kind] / switched[name][kind] for kind in without[name]}
        for name in ("latency_s", "ttft_s", "tpot_s")
    }


_LOOK_S = 0.25
_STATES = {"DRAINING": DRAINING, "REBUILDING": REBUILDING}


class Watcher:
    """Looks four times a second. Times are seconds since it was made."""

    def __init__(self, urls: Mapping[str, str]) -> None:
        self._urls = urls
        self._began = time.monotonic()
        self._last: dict[str, tuple[str, float]] = {}
        self._spans: list[Span] = []

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        async with httpx.AsyncClient(timeout=10, trust_env=False) as client, asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._watch(client, name, url)) for name, url in self._urls.items()]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()

    async def _watch(self, client: httpx.AsyncClient, name: str, url: str) -> None:
        while True:
            with suppress(httpx.HTTPError):
                info = (await client.get(f"{url}/info")).json()
                self.note(name, _STATES.get(info["state"], info["role"]), time.monotonic() - self._began)
            await asyncio.sleep(_LOOK_S)

    def note(self, name: str, state: str, now_s: float) -> None:
        """``state``: a role, or what plots call the way to another."""
        before, since_s = self._last.get(name, (None, 0.0))
        if state == before:
            return
        if before is not None:
            self._spans.append((name, before, since_s, now_s))
        self._last[name] = state, now_s

    def spans(self, until_s: float) -> list[Span]:
        """All that lie before, the last one of each instance up to there."""
        open_ones = ((name, state, since_s, until_s) for name, (state, since_s) in self._last.items())
        return [
            (name, state, since_s, min(end_s, until_s))
            for name, state, since_s, end_s in (*self._spans, *open_ones)
            if since_s < until_s
        ]

    def layout(self) -> str:
        """The roles of now."""
        return layout_of(state for state, _ in self._last.values())


def layout_of(roles: Iterable[str]) -> str:
    """As in 2E1P5D."""
    known = list(roles)
    return "".join(f"{known.count(role)}{role}" for role in ("E", "P", "D") if role in known)
