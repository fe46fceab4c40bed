"""EPD-Serve Table 2: the part of the time to first token that each mechanism saves."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from itertools import accumulate
from pathlib import Path
from typing import Any

import httpx

from benchmarks.deployed import Timing, ask, deployed, figures, growth, open_loop
from benchmarks.models import make_model
from benchmarks.transfer_features import PATH, body, picture

#: The average image of ShareGPT-4o.
WIDTH, HEIGHT = 802, 652
TOKENS = 29 * 23
HIDDEN, LAYERS = 512, 8
#: In each of so many turns of all methods.
REQUESTS, ROUNDS = 50, 2
TINY_REQUESTS = 3
#: Share of a prefill's time that fetching its feature takes on the link; its KV takes as long.
TRANSFER_SHARE = 0.25
#: Arrivals as shares of what P could prefill if it did nothing else.
LOADS = (0.55, 0.75)
METHODS: dict[str, dict[str, Any]] = {
    "neither": {"prefetch": "sync", "kv": "oneshot"},
    "prefetch": {"kv": "oneshot"},
    "grouped": {"prefetch": "sync"},
    "both": {},
}
PAPER = {
    "rates": [2, 3],
    "ttft_ms": {
        "neither": [703.75, 880.22],
        "prefetch": [586.87, 688.86],
        "grouped": [590.80, 775.83],
        "both": [481.38, 650.51],
    },
}


def model(path: Path) -> Path:
    """Features and KV of a token take the same bytes: 2 KiB each."""
    return make_model(path, hidden=HIDDEN, layers=LAYERS, heads=4, kv_heads=1, intermediate=256)


SETTINGS = {"max_num_batched_tokens": 1024, "kv_cache_bytes": "256MiB"}


def requests(first: int, count: int) -> list[dict[str, Any]]:
    return [body(picture(first + i, WIDTH, HEIGHT)) for i in range(count)]


async def calibrate(path: Path) -> float:
    """Seconds that P takes for one prompt."""
    async with (
        deployed("E-P-D", path, SETTINGS) as deployment,
        httpx.AsyncClient(base_url=deployment.gateway_url, timeout=600) as client,
    ):
        for each in requests(0, 2):
            await ask(client, PATH, each)
        before = await figures(deployment, "p0")
        for each in requests(10, 5):
            await ask(client, PATH, each)
        grown = growth(before, await figures(deployment, "p0"))
    return grown["step_seconds_total:prefill"] / 5


async def table2(path: Path, *, tiny: bool) -> dict[str, Any]:
    num_requests, num_rounds = (TINY_REQUESTS, 1) if tiny else (REQUESTS, ROUNDS)
    prefill_s = await calibrate(path)
    feature_bytes = TOKENS * HIDDEN * 4
    link = {"bandwidth": round(feature_bytes / (TRANSFER_SHARE * prefill_s)), "latency_ms": 1.0}
    timings: dict[tuple[float, str], list[Timing]] = {(load, method): [] for load in LOADS for method in METHODS}
    grown: dict[tuple[float, str], Counter[str]] = {key: Counter() for key in timings}
    async with AsyncExitStack() as stack:
        # all at once, and in turns: what else the machine does falls on all methods alike
        deployments = {
            method: await stack.enter_async_context(deployed("E-P-D", path, SETTINGS, baselines=baselines | link))
            for method, baselines in METHODS.items()
        }
        for deployment in deployments.values():
            async with httpx.AsyncClient(base_url=deployment.gateway_url, timeout=600) as client:
                for each in requests(200, 3):
                    await ask(client, PATH, each)
        rng = random.Random(0)
        for turn in range(num_rounds):
            for index, load in enumerate(LOADS):
                arrivals = list(accumulate(rng.expovariate(load / prefill_s) for _ in range(num_requests)))
                bodies = requests(num_requests * (turn * len(LOADS) + index), num_requests)
                for method, deployment in deployments.items():
                    before = await figures(deployment, "p0")
                    timings[load, method] += await open_loop(deployment.gateway_url, PATH, bodies, arrivals)
                    grown[load, method].update(growth(before, await figures(deployment, "p0")))
    rows = [
        {
            "load": load,
            "rate": load / prefill_s,
            "method": method,
            **_summary(timings[load, method]),
            **_hidden(grown[load, method]),
        }
        for load, method in timings
    ]
    return {
        "prefill_ms": 1000 * prefill_s,
        "link": link,
        "requests": num_rounds * num_requests,
        "paper": PAPER,
        "rows": rows,
    }


def _summary(timings: list[Timing]) -> dict[str, float]:
    first = [1000 * timing.first_s for timing in timings]
    second = [1000 * timing.second_s for timing in timings]
    return {
        "ttft_ms": statistics.fmean(first),
        "ttft_median_ms": statistics.median(first),
        "decoded_ms": statistics.fmean(second),
        "decoded_median_ms": statistics.median(second),
    }


def _hidden(of_p: Mapping[str, float]) -> dict[str, float]:
    return {
        "kv_overlap": 1 - of_p["kv_exposed_seconds_total"] / of_p["kv_request_seconds_total"],
        "feature_overlap": 1 - of_p["feature_exposed_seconds_total"] / of_p["feature_transmission_seconds_sum"],
        "writes_per_request": of_p["kv_announcements_total"] / of_p["kv_requests_total"],
    }
