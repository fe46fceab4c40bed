"""The loads that each gateway gets, and their request bodies."""

from __future__ import annotations

import base64
import io
import json
import random
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from benchmarks.gateway.answers import MODEL

TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One load. ``rate``: requests per second of an open loop; 0: each connection waits for its answer.

    ``target`` is how many times less CPU than vLLM's EPD proxy a request is to take, ``target_ttft_ms`` what it
    may add to the time to first token, ``target_delay_ms`` the 99th percentile of a token's way through it.
    """

    name: str
    body: str
    connections: int
    gap_ms: int = 0
    rate: float = 0
    seconds: float = 3.0
    target: float | None = None
    target_ttft_ms: float | None = None
    target_delay_ms: float | None = None


CELLS = (
    Cell(name="text, c16", body="text", connections=16, target=7),
    Cell(name="1 image, c16", body="1 image", connections=16, target=5.5),
    Cell(name="4 images, c16", body="4 images", connections=16, target=4.5),
    Cell(name="3 MB, c16", body="3 MB", connections=16, target=5),
    Cell(name="text, 10 ms gaps, c256", body="text", connections=256, gap_ms=10, seconds=4, target=4),
    Cell(name="text, c1", body="text", connections=1, seconds=1.5, target_ttft_ms=0.3),
    Cell(name="1 image, c1", body="1 image", connections=1, seconds=1.5, target_ttft_ms=0.6),
    Cell(name="4 images, c1", body="4 images", connections=1, seconds=1.5, target_ttft_ms=1.2),
    Cell(name="3 MB, c1", body="3 MB", connections=1, seconds=1.5, target_ttft_ms=4),
    # 64 tokens with 20 ms between them: about 256 streams at a time
    Cell(
        name="1 image, 256 streams, open loop",
        body="1 image",
        connections=512,
        gap_ms=20,
        rate=200,
        seconds=5,
        target_delay_ms=20,
    ),
)


def write_bodies(directory: Path) -> dict[str, Path]:
    """Name of a body → its file."""
    small, large = _jpeg(200_000), _jpeg(3_000_000)
    pictures = {"text": [], "1 image": [small], "4 images": [small] * 4, "3 MB": [large]}
    paths = {}
    for name, images in pictures.items():
        paths[name] = directory / f"{name}.json"
        paths[name].write_bytes(_body(images))
    return paths


def _body(images: list[bytes]) -> bytes:
    content: list[dict[str, object]] = [
        {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{base64.b64encode(one).decode()}"}}
        for one in images
    ]
    content.append({"type": "text", "text": "What is to be seen here, and what does it mean? " * 4})
    chat = {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": "You answer in one sentence."},
            {"role": "user", "content": content},
        ],
        "max_tokens": TOKENS,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(chat).encode()


def _jpeg(nbytes: int) -> bytes:
    """Noise, so that its size follows from its area: a file of about ``nbytes``."""
    noise = random.Random(1)
    side = 256
    while True:
        buffer = io.BytesIO()
        Image.frombytes("RGB", (side, side), noise.randbytes(3 * side * side)).save(buffer, "JPEG", quality=85)
        size = buffer.tell()
        if abs(size - nbytes) < nbytes * 0.03:
            return buffer.getvalue()
        side = max(16, round(side * (nbytes / size) ** 0.5))
