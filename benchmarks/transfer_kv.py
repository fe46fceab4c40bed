"""EPD-Serve Table 4: how much of the KV transfer hides behind prefill, by the way in which it is sent."""

from __future__ import annotations

import asyncio
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.deployed import Figures, ask, closed_loop, deployed, figures, growth
from benchmarks.models import make_model

LAYERS = 28
MODES = ("oneshot", "layerwise", "grouped")
CONCURRENCY = 16
SETTINGS = {
    "max_num_batched_tokens": 16384,
    "kv_cache_bytes": "896MiB",
    "peer_timeout_s": 240,  # a link at which layer-wise sending falls far behind must not end a lease
}
PATH = "/v1/completions"
PLUG_TOKENS = 2048
REPEATS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Paper:
    """A row pair of the table: seconds of the optimised prefill and transfer; overlap of both methods in %."""

    prefill_s: float
    transfer_s: float
    baseline: float
    optimised: float
    bandwidth_gain: float


PAPER = {
    1024: Paper(prefill_s=6.61057, transfer_s=0.71553, baseline=15.27, optimised=98.78, bandwidth_gain=1.58),
    2048: Paper(prefill_s=14.26121, transfer_s=1.53649, baseline=25.08, optimised=99.92, bandwidth_gain=1.10),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The cost of 16 requests of one length, sums over them where not said otherwise.

    Attributes:
        kv_s: transfer time, handshakes included. exposed_s: the part of it after the own prompt was computed.
        wait_s: mean time from a prompt's end to its last KV byte.
    """

    tokens: int
    mode: str
    prefill_s: float
    kv_bytes: float
    writes: float
    kv_s: float
    exposed_s: float
    wait_s: float

    @property
    def overlap(self) -> float:
        return 1 - self.exposed_s / self.kv_s

    @property
    def bytes_per_s(self) -> float:
        return self.kv_bytes / self.kv_s

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "overlap": self.overlap, "bytes_per_s": self.bytes_per_s}


def model(path: Path) -> Path:
    return make_model(path, hidden=64, layers=LAYERS, heads=2, kv_heads=1, intermediate=128)


def baselines(mode: str, link: dict[str, Any] | None) -> dict[str, Any]:
    return {"kv": "" if mode == "grouped" else mode, **(link or {})}


def prompts(rng: random.Random, count: int, tokens: int) -> list[dict[str, Any]]:
    """Requests of which no two share a prefix."""
    return [
        {
            "prompt": [rng.randrange(10, 700) for _ in range(tokens)],
            "max_tokens": 2,
            "temperature": 0,
            "ignore_eos": True,
        }
        for _ in range(count)
    ]


async def batch(url: str, rng: random.Random, tokens: int, read: Any) -> Figures:
    """The part of 16 requests in P's figures that came while another prompt was being computed."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        (plug,) = prompts(rng, 1, PLUG_TOKENS)
        ahead = asyncio.create_task(ask(client, PATH, plug))
        await asyncio.sleep(0.1)
        asked = asyncio.create_task(closed_loop(url, PATH, prompts(rng, CONCURRENCY, tokens), CONCURRENCY))
        await ahead
        before: Figures = await read()
        await asked
    await asyncio.sleep(0.5)  # P counts a hand-over after the client has its answer
    return growth(before, await read())


async def measure(path: Path, tokens: int, mode: str, link: dict[str, Any] | None, repeats: int) -> list[Row]:
    rows = []
    async with deployed("P-D", path, SETTINGS, baselines=baselines(mode, link)) as deployment:
        rng = random.Random(tokens)

        async def read() -> Figures:
            return await figures(deployment, "p0")

        await closed_loop(deployment.gateway_url, PATH, prompts(rng, 3, 512), 1)  # the link becomes known
        for _ in range(repeats):
            for _ in range(5):  # a hand-over may come before the first figures are read
                grown = await batch(deployment.gateway_url, rng, tokens, read)
                if grown["kv_requests_total"] == CONCURRENCY:
                    break
            else:
                raise RuntimeError(f"{grown['kv_requests_total']:g} hand-overs of {CONCURRENCY}")
            rows.append(
                Row(
                    tokens=tokens,
                    mode=mode,
                    prefill_s=grown["step_seconds_total:prefill"],
                    kv_bytes=grown["kv_request_bytes_total"],
                    writes=grown["kv_announcements_total"],
                    kv_s=grown["kv_request_seconds_total"],
                    exposed_s=grown["kv_exposed_seconds_total"],
                    wait_s=grown["kv_wait_seconds_sum"] / CONCURRENCY,
                )
            )
    return rows


def median(rows: list[Row]) -> Row:
    return sorted(rows, key=lambda row: row.overlap)[len(rows) // 2]


async def table4(path: Path, *, tiny: bool) -> dict[str, Any]:
    """Calibrate the link on this machine's prefill, undisturbed as far as it goes, then compare: medians."""
    repeats, modes = (1, ("grouped",)) if tiny else (REPEATS, MODES)
    plain = {
        tokens: min(await measure(path, tokens, "grouped", None, repeats), key=lambda row: row.prefill_s)
        for tokens in PAPER
    }
    handshake_s = _falls_behind(plain)
    rows: list[dict[str, Any]] = []
    for tokens, paper in PAPER.items():
        bandwidth = plain[tokens].kv_bytes / (plain[tokens].prefill_s * paper.transfer_s / paper.prefill_s)
        link = {"bandwidth": round(bandwidth), "latency_ms": 1000 * handshake_s}
        for mode in modes:
            # layer by layer takes so long that other work on the machine evens out by itself
            row = median(await measure(path, tokens, mode, link, 1 if mode == "layerwise" else repeats))
            rows.append({**row.as_json(), "link": link})
            print(f"  {tokens} {mode}: overlap {100 * row.overlap:.2f} %", flush=True)
    return {
        "handshake_ms": 1000 * handshake_s,
        "layer_ms": 1000 * plain[1024].prefill_s / LAYERS,
        "paper": {tokens: asdict(paper) for tokens, paper in PAPER.items()},
        "rows": rows,
    }


def _falls_behind(plain: dict[int, Row]) -> float:
    """The handshake in seconds at which layer by layer about as little is hidden as in the paper's baseline.

    The link is busy for ``layers · prompts · handshake + bytes`` then, and for the plug's handshakes before; of
    that it has what computing the plug and the prompts takes.
    """
    paper, row = PAPER[1024], plain[1024]
    share = paper.baseline / 100
    bytes_s = row.prefill_s * paper.transfer_s / paper.prefill_s
    plug_s = plain[2048].prefill_s / CONCURRENCY
    return (row.prefill_s + plug_s - share * bytes_s) / (LAYERS * (1 + CONCURRENCY * share))
