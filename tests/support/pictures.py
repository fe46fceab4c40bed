"""Pictures for tests."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image

from epd_serve.media.picture import MediaLimits

LIMITS = MediaLimits(max_pixels=32 << 20, max_bytes=32 << 20)


def noise(seed: int, size: tuple[int, int] = (120, 90)) -> Image.Image:
    """Random pixels: no two seeds look alike to a model."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    """A picture's file; ``options`` are Pillow's."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png(image: Image.Image) -> bytes:
    return saved(image, "PNG")


def with_scans(image: Image.Image, count: int) -> bytes:
    """A progressive JPEG with so many scans more than Pillow makes."""
    data = saved(image, "JPEG", progressive=True)
    last, end = data.rindex(b"\xff\xda"), data.rindex(b"\xff\xd9")
    return data[:end] + data[last:end] * count + data[end:]


#: Questions and their pictures; one asks again for a picture, one for two in the other order.
QUESTIONS: list[tuple[str, list[Image.Image]]] = [
    ("What is this?", [noise(1)]),
    ("Say apple", []),
    ("What is in the picture?", [noise(2, (60, 140)), noise(3, (90, 90))]),
    ("What color is the circle?", [noise(1)]),
    ("Repeat: " + "apple banana " * 20, []),
    ("What is in the picture?", [noise(3, (90, 90)), noise(2, (60, 140))]),
    ("Where is it?", [noise(4, (200, 70))]),
    ("What is 2 + 3?", []),
]
