"""EPD's table 6 with processes on this machine's CPU: the same requests with the controller and without it."""

from __future__ import annotations

import asyncio
import base64
import random
import socket
import time
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx

from benchmarks.deployed import Timing, ask, closed_loop, machine
from benchmarks.elastic.plots import DRAINING, REBUILDING, Span
from epd_serve.config import DeploymentConfig
from epd_serve.launch import LocalDeployment

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "three-shapes.png"
PATH = "/v1/chat/completions"
#: Answers before and after the change, in tokens.
SHORT, LONG = 16, 160
#: Of what one decode instance can do: too much for it, and not for several.
OVERLOAD = 1.6
_STATES = {"DRAINING": DRAINING, "REBUILDING": REBUILDING}
_LOOK_S = 0.2


def config(topology: str, *, controlled: bool, admin_port: int) -> DeploymentConfig:
    """Decode instances with few places in a step, so that these and not a machine's cores are what is scarce."""
    return DeploymentConfig.model_validate(
        {
            "topology": topology,
            "served_model_name": "benchmark",
            "gateway": {"port": 0, "admin": {"port": admin_port}},
            "slo": {"ttft_ms": 3000, "tpot_ms": 150},
            "instances": {"base_port": 0, "threads": 1, "queue_timeout_s": 300, "num_blocks": 2048},
            "roles": {"D": {"max_num_seqs": 4, "batching": {"policy": "unlimited"}}},
            "elastic": {
                "enabled": controlled,
                "interval_s": 0.5,
                "hold_s": 1.5,
                "window_s": 8,
                "cooldown_s": 4,
                "deadline_s": 20,
            },
        }
    )


def body(number: int, num_tokens: int) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(PICTURE.read_bytes()).decode()}"
    text = {"type": "text", "text": f"Picture {number}: where is the blue square?"}
    content = [{"type": "image_url", "image_url": {"url": url}}, text]
    sampling = {"temperature": 0, "max_tokens": num_tokens, "ignore_eos": True}
    return {**sampling, "messages": [{"role": "user", "content": content}]}


class Watcher:
    """What each instance says of its role, five times a second."""

    def __init__(self, deployment: LocalDeployment) -> None:
        self._urls = {name: one.url for name, one in deployment.instances.items()}
        self._began = time.monotonic()
        self.spans: list[Span] = []

    async def run(self) -> None:
        """Until cancelled."""
        async with httpx.AsyncClient(timeout=10) as client:
            while True:
                await asyncio.gather(*(self._look(client, name) for name in self._urls))
                await asyncio.sleep(_LOOK_S)

    async def _look(self, client: httpx.AsyncClient, name: str) -> None:
        with suppress(httpx.HTTPError):
            info = (await client.get(f"{self._urls[name]}/info")).json()
            state = _STATES.get(info["state"], info["role"])
            now = time.monotonic() - self._began
            last = next((index for index, span in enumerate(self.spans) if span[0] == name and span[3] < 0), None)
            if last is not None and self.spans[last][1] == state:
                return
            if last is not None:
                _, before, begin, _ = self.spans[last]
                self.spans[last] = (name, before, begin, now)
            self.spans.append((name, state, now, -1.0))

    def close(self) -> list[Span]:
        now = time.monotonic() - self._began
        return [(name, state, begin, now if end < 0 else end) for name, state, begin, end in self.spans]


async def rate_of(topology: str) -> float:
    """Requests a second of the long kind that are too many for one decode instance."""
    async with LocalDeployment(config(topology, controlled=False, admin_port=free_port())) as deployment:
        url = deployment.gateway_url
        await closed_loop(url, PATH, [body(number, SHORT) for number in range(4)], 2)
        began = time.monotonic()
        await closed_loop(url, PATH, [body(100 + number, LONG) for number in range(12)], 8)
        return OVERLOAD * 12 / (time.monotonic() - began)


async def run(topology: str, count: int, rate: float, *, controlled: bool, seed: int = 0) -> dict[str, Any]:
    """Figures of all requests; raises RuntimeError where one has failed, or memory is not given back."""
    draw = random.Random(seed)
    at_s, arrivals = 0.0, []
    for _ in range(count):
        at_s += draw.expovariate(rate)
        arrivals.append(at_s)
    port = free_port()
    async with LocalDeployment(config(topology, controlled=controlled, admin_port=port)) as deployment:
        url = deployment.gateway_url
        await closed_loop(url, PATH, [body(1000 + number, SHORT) for number in range(4)], 2)
        watcher = Watcher(deployment)
        watching = asyncio.create_task(watcher.run())
        try:
            timings = await open_loop(url, arrivals, [SHORT if n < count // 10 else LONG for n in range(count)])
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        async with httpx.AsyncClient(timeout=10) as client:
            decisions = (await client.get(f"http://127.0.0.1:{port}/elastic")).json()["decisions"]
            left = await books(client, deployment)
    return {
        "latency_s": fmean(one.tokens_s[-1] for one in timings),
        "ttft_s": fmean(one.first_s for one in timings),
        "tpot_s": fmean((one.tokens_s[-1] - one.first_s) / (len(one.tokens_s) - 1) for one in timings),
        "failed": 0,
        "left": left,
        "switches": [one for one in decisions or () if one["order"] is not None],
        "spans": watcher.close(),
        "shift_s": arrivals[count // 10],
    }


async def open_loop(url: str, arrivals_s: list[float], lengths: list[int]) -> list[Timing]:
    async def later(client: httpx.AsyncClient, number: int) -> Timing:
        await asyncio.sleep(arrivals_s[number])
        return await ask(client, PATH, body(number, lengths[number]))

    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        return await asyncio.gather(*(later(client, number) for number in range(len(lengths))))


async def books(client: httpx.AsyncClient, deployment: LocalDeployment) -> dict[str, Any]:
    """What instances still hold once all is answered, ten seconds at most after that; {} for nothing."""
    deadline = time.monotonic() + 10
    while True:
        answers = {name: await client.get(f"{one.url}/integrity") for name, one in deployment.instances.items()}
        held = {name: answer.json() for name, answer in answers.items() if any(answer.json().values())}
        if not held or time.monotonic() > deadline:
            return held
        await asyncio.sleep(0.2)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


async def table_6(topology: str, count: int, repeats: int) -> tuple[dict[str, Any], list[Span], float]:
    """The report; of the first controlled run the roles over time, and when answers got longer."""
    rate = await rate_of(topology)
    rows: list[dict[str, Any]] = []
    spans: list[Span] = []
    shift_s = 0.0
    for repeat in range(repeats):
        found: dict[str, Any] = {}
        for name, controlled in (("with", True), ("without", False)):
            found[name] = await run(topology, count, rate, controlled=controlled, seed=repeat)
            roles = found[name].pop("spans")
            if controlled and not spans:
                spans, shift_s = roles, found[name]["shift_s"]
        found["ratio"] = {
            figure: found["without"][figure] / found["with"][figure]
            for figure in ("latency_s", "ttft_s", "tpot_s")
        }
        rows.append(found)
    report = {
        "machine": machine(),
        "topology": topology,
        "requests": count,
        "rate": rate,
        "output_tokens": [SHORT, LONG],
        "rows": rows,
    }
    return report, spans, shift_s
