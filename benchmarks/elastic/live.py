"""EPD's table 6 with processes on this machine's CPU: the same requests with the controller and without it.

An instance computes on one thread, so that one decode instance has one core's worth of steps, however many cores
there are; a switch gives it another core. The rate is found by measuring: what is asked for in long answers is
:data:`OVERLOAD` times what one decode instance can give. The controller is told neither the change nor a layout.
"""

from __future__ import annotations

import asyncio
import base64
import io
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import httpx
import numpy as np
from PIL import Image

from benchmarks.deployed import Timing, closed_loop, machine, open_loop
from benchmarks.elastic.plots import DRAINING, REBUILDING, Span
from epd_serve.config import DeploymentConfig
from epd_serve.launch import LocalDeployment
from epd_serve.launch.ports import free_port

PATH = "/v1/chat/completions"
START = "3E-P-D"
#: Answers before and after the change, in tokens.
SHORT, LONG = 16, 160
OVERLOAD = 1.3
#: Between two tokens, in times of what it takes where nobody else is served.
TPOT_SLO = 3.0
_CONCURRENCY = 24
_LOOK_S = 0.2
_STATES = {"DRAINING": DRAINING, "REBUILDING": REBUILDING}


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """``rate``: requests a second. ``tpot_s``: of one alone; ``tokens_per_s``: of one decode instance."""

    rate: float
    tpot_s: float
    tokens_per_s: float


def config(topology: str, admin_port: int, tpot_s: float, *, controlled: bool) -> DeploymentConfig:
    return DeploymentConfig.model_validate(
        {
            "topology": topology,
            "served_model_name": "benchmark",
            "gateway": {"port": 0, "admin": {"port": admin_port}},
            "slo": {"ttft_ms": 2600, "tpot_ms": 1e3 * TPOT_SLO * tpot_s},
            "instances": {
                "base_port": 0,
                "threads": 1,
                "queue_timeout_s": 300,
                "num_blocks": 4096,
                "max_num_seqs": 256,
                "batching": {"policy": "unlimited"},
            },
            "elastic": {"enabled": controlled, "interval_s": 0.5, "hold_s": 1.5, "cooldown_s": 3},
        }
    )


def body(number: int, num_tokens: int) -> dict[str, Any]:
    """A picture that no other number has."""
    pixels = np.random.default_rng(number).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    text = {"type": "text", "text": "Where is the blue square?"}
    content = [{"type": "image_url", "image_url": {"url": url}}, text]
    sampling = {"temperature": 0, "max_tokens": num_tokens, "ignore_eos": True}
    return {**sampling, "messages": [{"role": "user", "content": content}]}


class Watcher:
    """What each instance says of its role, five times a second."""

    def __init__(self, deployment: LocalDeployment) -> None:
        self._urls = {name: one.url for name, one in deployment.instances.items()}
        self._began = time.monotonic()
        self._last: dict[str, tuple[str, float]] = {}
        self._spans: list[Span] = []

    async def run(self) -> None:
        """Until cancelled."""
        async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
            while True:
                await asyncio.gather(*(self._look(client, name) for name in self._urls))
                await asyncio.sleep(_LOOK_S)

    async def _look(self, client: httpx.AsyncClient, name: str) -> None:
        with suppress(httpx.HTTPError):
            info = (await client.get(f"{self._urls[name]}/info")).json()
            state = _STATES.get(info["state"], info["role"])
            before, since_s = self._last.get(name, (None, 0.0))
            if state == before:
                return
            now = time.monotonic() - self._began
            if before is not None:
                self._spans.append((name, before, since_s, now))
            self._last[name] = state, now

    def close(self) -> list[Span]:
        """All spans until now."""
        now = time.monotonic() - self._began
        return [*self._spans, *((name, state, since_s, now) for name, (state, since_s) in self._last.items())]


async def find_pace() -> Pace:
    """Of this machine as it is now, with one decode instance."""
    async with LocalDeployment(config("E-P-D", free_port("127.0.0.1"), 1.0, controlled=False)) as deployment:
        url = deployment.gateway_url
        await closed_loop(url, PATH, [body(10_000 + number, SHORT) for number in range(4)], 2)
        alone = await closed_loop(url, PATH, [body(10_100 + number, LONG) for number in range(4)], 1)
        began = time.monotonic()
        many = 3 * _CONCURRENCY
        await closed_loop(url, PATH, [body(10_200 + number, LONG) for number in range(many)], _CONCURRENCY)
        tokens_per_s = many * LONG / (time.monotonic() - began)
    return Pace(
        rate=OVERLOAD * tokens_per_s / LONG,
        tpot_s=median(_tpot_s(one) for one in alone),
        tokens_per_s=tokens_per_s,
    )


async def run(pace: Pace, count: int, seed: int, *, controlled: bool) -> tuple[dict[str, Any], list[Span], float]:
    """Figures, roles over time, and when answers got longer. Raises RuntimeError where a request has failed."""
    draw = random.Random(seed)
    at_s, arrivals_s = 0.0, []
    for _ in range(count):
        at_s += draw.expovariate(pace.rate)
        arrivals_s.append(at_s)
    bodies = [body(1000 * seed + n, SHORT if n < count // 10 else LONG) for n in range(count)]
    port = free_port("127.0.0.1")
    async with LocalDeployment(config(START, port, pace.tpot_s, controlled=controlled)) as deployment:
        url = deployment.gateway_url
        await closed_loop(url, PATH, [body(20_000 + number, SHORT) for number in range(6)], 2)
        watcher = Watcher(deployment)
        watching = asyncio.create_task(watcher.run())
        began, wall_s = time.monotonic(), time.time()
        try:
            timings = await open_loop(url, PATH, bodies, arrivals_s)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        seconds, spans = time.monotonic() - began, watcher.close()
        async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
            decisions = (await client.get(f"http://127.0.0.1:{port}/elastic")).json()["decisions"] or ()
            held = await _held(client, deployment)
    found = {
        "latency_s": fmean(one.tokens_s[-1] for one in timings),
        "ttft_s": fmean(one.first_s for one in timings),
        "tpot_s": fmean(map(_tpot_s, timings)),
        "seconds": seconds,
        "held_in_the_end": held,
        "end": _layout(spans),
        "switches": [
            {"at_s": one["time"] - wall_s, "reason": one["reason"]}
            for one in decisions
            if one["order"] is not None
        ],
    }
    return found, spans, arrivals_s[count // 10]


async def table_6(count: int, seeds: Sequence[int]) -> tuple[dict[str, Any], list[Span], float]:
    """The report; of the first seed the roles over time with switches, and when answers got longer."""
    pace = await find_pace()
    rows: list[dict[str, Any]] = []
    spans: list[Span] = []
    shift_s = 0.0
    for seed in seeds:
        without, _, _ = await run(pace, count, seed, controlled=False)
        switched, roles, at_s = await run(pace, count, seed, controlled=True)
        if not spans:
            spans, shift_s = roles, at_s
        ratio = {name: without[name] / switched[name] for name in ("latency_s", "ttft_s", "tpot_s")}
        rows.append({"seed": seed, "with": switched, "without": without, "ratio": ratio})
    report = {
        "machine": machine(),
        "start": START,
        "requests": count,
        "rate": pace.rate,
        "tokens_per_s_of_one_decode_instance": pace.tokens_per_s,
        "tpot_s_of_one_alone": pace.tpot_s,
        "tpot_slo_s": TPOT_SLO * pace.tpot_s,
        "output_tokens": [SHORT, LONG],
        "rows": rows,
    }
    return report, spans, shift_s


def _tpot_s(timing: Timing) -> float:
    return (timing.tokens_s[-1] - timing.first_s) / (len(timing.tokens_s) - 1)


def _layout(spans: Sequence[Span]) -> str:
    """The last one, as in 2E1P5D."""
    last = {name: state for name, state, *_ in sorted(spans, key=lambda span: span[3])}
    roles = list(last.values())
    return "".join(f"{roles.count(role)}{role}" for role in ("E", "P", "D") if role in roles)


async def _held(client: httpx.AsyncClient, deployment: LocalDeployment) -> dict[str, Any]:
    """What instances still hold once all is answered, ten seconds at most after that; {} for nothing."""
    deadline = time.monotonic() + 10
    while True:
        answers = {name: await client.get(f"{one.url}/integrity") for name, one in deployment.instances.items()}
        held = {name: answer.json() for name, answer in answers.items() if any(answer.json().values())}
        if not held or time.monotonic() > deadline:
            return held
        await asyncio.sleep(0.2)
