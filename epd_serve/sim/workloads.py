"""Requests to simulate: the papers' data sets by their published sizes; the same seed, the same requests."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from epd_serve.protocol.wire import USUAL_FPS, MediaRef


@dataclass(frozen=True, kw_only=True, slots=True)
class SimRequest:
    """One request.

    Attributes:
        at_s: when it is sent.
        images: (name, pixels) of each; equal names are the same image.
        videos: (name, pixels of a frame, frames) of each; two frames are as much as an image.
        num_text_tokens: of the prompt, images apart.
        num_output_tokens: that it gets.
        prefix: names of the prompt's leading parts of ``prefix_tokens`` tokens each, for prefix reuse.
        max_tokens: as the client gave it to the gateway; None: open-ended.
    """

    at_s: float
    num_text_tokens: int
    num_output_tokens: int
    images: tuple[tuple[str, int], ...] = ()
    videos: tuple[tuple[str, int, int], ...] = ()
    prefix: tuple[int, ...] = ()
    prefix_tokens: int = 512
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.num_text_tokens < 1 or self.num_output_tokens < 1 or self.at_s < 0:
            raise ValueError(f"{self}: a request has a prompt, an answer and a time of 0 or later")

    @property
    def modality(self) -> str:
        return "image" if self.images else "video" if self.videos else "text"

    @property
    def media(self) -> list[MediaRef]:
        videos = (
            MediaRef(name, pixels, 1, "video", num_frames=num_frames, fps=USUAL_FPS)
            for name, pixels, num_frames in self.videos
        )
        return [*(MediaRef(name, pixels, 1) for name, pixels in self.images), *videos]

    @property
    def num_pixels(self) -> int:
        return sum(item.num_pixels for item in self.media)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadShape:
    """Sizes of requests.

    Attributes:
        image_share: of requests with images; num_images: that these have.
        width, height: of images, on average; spread: standard deviation of the logarithm of their area.
        num_text_tokens, num_output_tokens: means; of text the spread is half of the mean, of answers that too
            unless ``is_fixed``.
        num_distinct: images are drawn from so many; None: none comes twice.
    """

    name: str
    image_share: float = 1.0
    num_images: int = 1
    width: int = 802
    height: int = 652
    spread: float = 0.3
    num_text_tokens: float = 10.0
    num_output_tokens: float = 64.0
    is_fixed: bool = True
    num_distinct: int | None = None

    def requests(self, count: int, rate: float, seed: int) -> list[SimRequest]:
        """``count`` of them, at random times (Poisson) with ``rate`` a second."""
        if not rate > 0:
            raise ValueError(f"a rate of {rate:g} requests a second never comes to an end")
        draw = random.Random(f"{self.name} {seed}")
        at_s = 0.0
        requests: list[SimRequest] = []
        for number in range(count):
            at_s += draw.expovariate(rate)
            images: tuple[tuple[str, int], ...] = ()
            if draw.random() < self.image_share:
                images = tuple(self._image(draw, f"{number}.{i}") for i in range(self.num_images))
            requests.append(
                SimRequest(
                    at_s=at_s,
                    images=images,
                    num_text_tokens=_about(draw, self.num_text_tokens),
                    num_output_tokens=max(round(self.num_output_tokens), 1)
                    if self.is_fixed
                    else _about(draw, self.num_output_tokens),
                )
            )
        return requests

    def _image(self, draw: random.Random, name: str) -> tuple[str, int]:
        if self.num_distinct is not None:
            name = str(draw.randrange(self.num_distinct))
            draw = random.Random(f"{self.name} image {name}")
        area = self.width * self.height * math.exp(draw.gauss(-(self.spread**2) / 2, self.spread))
        return name, max(round(area), 28 * 28)


def _about(draw: random.Random, mean: float) -> int:
    return max(round(draw.gauss(mean, mean / 2)), 1)


#: EPD-Serve, section 4.1: mean sizes; all answers have 64 tokens.
SHAREGPT_4O = WorkloadShape(name="sharegpt-4o", width=802, height=652, num_text_tokens=9.6)
VISUAL_WEB_INSTRUCT = WorkloadShape(
    name="visualwebinstruct", image_share=0.5, width=1280, height=720, spread=0.0, num_text_tokens=63.1
)
TEXT = WorkloadShape(name="text", image_share=0.0, num_text_tokens=512, num_output_tokens=128, is_fixed=False)


def at_rate(requests: Sequence[SimRequest], rate: float) -> list[SimRequest]:
    """The same requests, their times stretched or squeezed to a mean ``rate`` a second."""
    if not requests:
        return []
    first, last = requests[0].at_s, requests[-1].at_s
    span = last - first
    factor = (len(requests) - 1) / rate / span if span > 0 else 0.0
    return [
        replace(one, at_s=(one.at_s - first) * factor if span > 0 else number / rate)
        for number, one in enumerate(requests)
    ]
