"""Pictures for tests."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from epd_serve.media.picture import MediaLimits

LIMITS = MediaLimits(max_pixels=32 << 20, max_bytes=32 << 20)


def noise(seed: int, size: tuple[int, int] = (120, 90)) -> Image.Image:
    """Random pixels: no two seeds look alike to a model."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()
