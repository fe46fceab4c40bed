"""Generated pictures, videos and sounds as chat content parts."""

from __future__ import annotations

import base64
import io
import math
import random
import wave
from collections.abc import Sequence
from typing import Any

from PIL import Image, ImageDraw


def picture(color: Any = "red", size: tuple[int, int] = (64, 64), mode: str = "RGB", form: str = "PNG") -> Any:
    """Return a picture of one colour."""
    image = Image.new("RGB", size, color)
    image = image.convert("I").convert(mode) if mode == "I;16" else image.convert(mode)
    return part(_file(image, form), f"image/{form.lower()}")


def noise(number: int) -> Any:
    """Return a distinct noisy picture for each number, in one of three sizes."""
    rng, size = random.Random(number), ((120, 90), (200, 150), (90, 240))[number % 3]
    image = Image.frombytes("RGB", size, bytes(one % 60 for one in rng.randbytes(3 * size[0] * size[1])))
    draw = ImageDraw.Draw(image)
    for _ in range(3):
        x, y = rng.randrange(size[0]), rng.randrange(size[1])
        draw.rectangle((x, y, x + 50, y + 50), fill=tuple(rng.randbytes(3)))
    return part(_file(image))


def rotated() -> tuple[Any, Any, Any]:
    """Return a picture with an EXIF rotation, the rotated picture, and the one without the tag."""
    image = Image.new("RGB", (64, 64), "red")
    image.paste("blue", (0, 0, 64, 20))
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees clockwise
    upright = image.transpose(Image.Transpose.ROTATE_270)
    return part(_file(image, exif=exif)), part(_file(upright)), part(_file(image))


def clip(colors: Sequence[str], num_frames: int = 8) -> Any:
    """Return a video as a list of JPEG frames: vLLM's format, which needs no codec."""
    images = (Image.new("RGB", (64, 64), colors[n * len(colors) // num_frames]) for n in range(num_frames))
    frames = ",".join(base64.b64encode(_file(image, "JPEG")).decode() for image in images)
    return {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{frames}"}}


def sound(hertz: float) -> Any:
    """Return a tone of one second at 16 kHz."""
    samples = (round(20_000 * math.sin(2 * math.pi * hertz * n / 16_000)) for n in range(16_000))
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, 16_000, 16_000, "NONE", ""))
        file.writeframes(b"".join(sample.to_bytes(2, "little", signed=True) for sample in samples))
    data = base64.b64encode(buffer.getvalue()).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def part(data: bytes, mime: str = "image/png") -> Any:
    """Return a file as a data URL part of its kind."""
    url = f"data:{mime};base64,{base64.b64encode(data).decode()}"
    return url_part(url, mime.partition("/")[0])


def url_part(url: str, kind: str = "image") -> Any:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def asked(*parts: Any, text: str = "What color is it?") -> list[Any]:
    """Return message content: parts, then a question about them."""
    return [*parts, {"type": "text", "text": text}]


def _file(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()
