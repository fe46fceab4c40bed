"""Requests to simulate, drawn from the papers' published sizes; the same seed, the same requests."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from epd_serve.sim.workloads import SimRequest


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
