"""EPD-Serve Table 3: how much of the feature transfer hides behind queueing at the prefill instance."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from benchmarks.common import CHAT_PATH, data_url, encoded, greedy_chat
from benchmarks.deployed import Figures, ask, closed_loop, deployed, figures, growth
from benchmarks.models import make_model
from epd_serve.instance.calls import LookApp
from epd_serve.launch.deployment import LocalDeployment
from epd_serve.protocol import wire
from epd_serve.rpc.link import Link
from epd_serve.rpc.server import LinkService, Reply, serve_app
from proxy.media.loader import mm_hash

HIDDEN = 3584
PATH = CHAT_PATH
#: One link for all sizes, at which none is faster than in the paper.
LINK = {"bandwidth": "159MB/s", "latency_ms": 3.6}


@dataclass(frozen=True, kw_only=True, slots=True)
class Paper:
    """A row of the table. Milliseconds, percent."""

    height: int
    width: int
    transmission_ms: float
    scheduling_ms: float
    overlap: float


PAPER = (
    Paper(height=280, width=280, transmission_ms=8.145, scheduling_ms=30.803, overlap=100),
    Paper(height=560, width=560, transmission_ms=15.819, scheduling_ms=42.406, overlap=100),
    Paper(height=640, width=640, transmission_ms=17.019, scheduling_ms=49.549, overlap=100),
    Paper(height=720, width=1280, transmission_ms=38.776, scheduling_ms=81.028, overlap=100),
    Paper(height=1080, width=1920, transmission_ms=80.771, scheduling_ms=151.77, overlap=100),
    Paper(height=3112, width=4096, transmission_ms=729.724, scheduling_ms=728.109, overlap=99.78),
)


def model(path: Path) -> Path:
    """Features [tokens, 3584], and one narrow layer, so that a prompt of 16206 tokens takes seconds here."""
    return make_model(
        path, hidden=HIDDEN, layers=1, heads=4, kv_heads=1, intermediate=256, max_length=20480, max_pixels=1 << 25
    )


def picture(seed: int, width: int, height: int) -> bytes:
    """A PNG that no other seed has; smooth, so that the file is small."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    pixels = np.stack([x, y, np.full_like(x, seed % 256)], axis=2).astype(np.uint8)
    return encoded(Image.fromarray(pixels), compress_level=1)


def body(data: bytes) -> dict[str, Any]:
    return greedy_chat("What is this?", [data_url(data)], max_tokens=2)


async def encode_ahead(deployment: LocalDeployment, pictures: list[tuple[bytes, int, int]]) -> None:
    """Have the encoder store features without any prefill instance fetching them: the event goes to us."""

    async def take(body: bytes) -> Reply:
        return Reply()

    service = LinkService(calls={"/feature/event": take})
    encoder = deployment.instances["e0"].url
    listener = socket.create_server(("127.0.0.1", 0))
    announce_to = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with serve_app(LookApp(service), listener, service.protocol), Link("e0", encoder) as link:
        fingerprint = json.loads(await link.ask("/info"))["media_fingerprint"]
        for index, (data, width, height) in enumerate(pictures):
            ref = wire.MediaRef(mm_hash(data, "image", fingerprint), width, height)
            request = wire.EncodeRequest(f"ahead-{index}", ref, data, announce_to)
            await link.ask("/stage/encode", [wire.encode(request)])


async def size(deployment: LocalDeployment, paper: Paper, seed: int) -> dict[str, Any]:
    """Requests with images of one size: alone on an idle instance, then several at a time."""
    concurrency, rest = (4, 8) if paper.height > 2000 else (16, 48)
    count = concurrency + rest
    pictures = [
        (picture(seed + i, paper.width, paper.height), paper.width, paper.height) for i in range(count + 1)
    ]
    await encode_ahead(deployment, pictures)
    bodies = [body(data) for data, _, _ in pictures]

    async def read() -> Figures:
        return await figures(deployment, "p0")

    start = await read()
    async with httpx.AsyncClient(base_url=deployment.gateway_url, timeout=600) as client:
        await ask(client, PATH, bodies[0])
    alone = growth(start, await read())
    # the first ones find the instance idle, all at once; what is counted begins when they are through
    warm = asyncio.Event()
    finished = 0

    async def watched() -> Figures:
        await warm.wait()
        return await read()

    async def work(client: httpx.AsyncClient, waiting: Any) -> None:
        nonlocal finished
        for each in waiting:
            await ask(client, PATH, each)
            finished += 1
            if finished == concurrency:
                warm.set()

    before = asyncio.create_task(watched())
    async with httpx.AsyncClient(base_url=deployment.gateway_url, timeout=600) as client:
        waiting = iter(bodies[1:])
        await asyncio.gather(*(work(client, waiting) for _ in range(concurrency)))
    loaded = growth(await before, await read())
    return {
        "image": f"{paper.height}x{paper.width}",
        "concurrency": concurrency,
        "feature_bytes": alone["feature_bytes_total"],
        **_row(loaded),
        "alone": _row(alone),
        "paper": {
            "transmission_ms": paper.transmission_ms,
            "scheduling_ms": paper.scheduling_ms,
            "overlap": paper.overlap,
        },
    }


def _row(grown: Figures) -> dict[str, float]:
    count = grown["feature_transmission_seconds_count"]
    transmission_s = grown["feature_transmission_seconds_sum"]
    return {
        "features": count,
        "transmission_ms": 1000 * transmission_s / count,
        "scheduling_ms": 1000 * grown["feature_scheduling_seconds_sum"] / count,
        "overlap": 1 - grown["feature_exposed_seconds_total"] / transmission_s,
    }


async def table3(path: Path, *, tiny: bool) -> dict[str, Any]:
    settings = {
        "max_num_batched_tokens": 256,  # small images must queue too, not all go in one step
        "kv_cache_bytes": "336MiB",
        "max_model_len": 20480,
        "feature_cache_bytes": "3GiB",
        "peer_timeout_s": 300,
    }
    rows = []
    async with deployed("E-P-D", path, settings, dtype="bfloat16", baselines=LINK) as deployment:
        await closed_loop(deployment.gateway_url, PATH, [body(picture(250, 280, 280))], 1)
        for index, paper in enumerate(PAPER[:1] if tiny else PAPER):
            rows.append(await size(deployment, paper, 20 * index))
            print(f"  {rows[-1]}", flush=True)
    return {"link": LINK, "rows": rows}
