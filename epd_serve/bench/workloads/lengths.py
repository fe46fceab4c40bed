"""Numbers and image sizes drawn from a distribution, given as a short text.

==========================  ====================================================
``64``                      constant
``16..128``                 uniform, both ends included
``normal:64:16``            mean and standard deviation
``lognormal:64:32``         the same; a few values are much larger
``exponential:64``          mean
``32@0.9+512@0.1``          one of several, by weight
``802x652``                 image size, width first
``lognormal:802x652:0.35``  sizes with this mean; 0.35 is the relative standard deviation of each side
``640x480@3+1280x720``      one of several sizes, by weight (default 1)
==========================  ====================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import TypeAlias, TypeVar

from epd_serve.bench.workloads.options import parse_factor, parse_number

Size = tuple[int, int]
Value = TypeVar("Value")
#: Smallest and largest side of a drawn image.
SIDES = (28, 8192)
#: A distribution.
Draw: TypeAlias = Callable[[Random], Value]


def parse_lengths(text: str, *, at_least: int = 1) -> Draw[int]:
    """Read a distribution of whole numbers. Raises ValueError with what can be written."""
    draw = _parse_mixture(text, _parse_whole_numbers, _NUMBERS)
    return lambda rng: max(at_least, round(draw(rng)))


def parse_seconds(text: str) -> Draw[float]:
    """Read a distribution of non-negative times."""
    draw = _parse_mixture(text, _parse_numbers, _NUMBERS)
    return lambda rng: max(0.0, draw(rng))


def parse_sizes(text: str) -> Draw[Size]:
    """Read a distribution of image sizes (width, height) in pixels."""
    return _parse_mixture(text, _parse_sizes, _SIZES)


_NUMBERS = "write a number, LOW..HIGH, normal:MEAN:STD, lognormal:MEAN:STD, exponential:MEAN or A@WEIGHT+B@WEIGHT"
_SIZES = "write WIDTHxHEIGHT, lognormal:WIDTHxHEIGHT:SPREAD or A@WEIGHT+B@WEIGHT"


def _parse_mixture(text: str, parse: Callable[[str], Draw[Value]], hint: str) -> Draw[Value]:
    draws, weights = [], []
    for part in text.split("+"):
        value, at, weight = part.partition("@")
        try:
            draws.append(parse(value.strip()))
            weights.append(parse_factor(weight) if at else 1.0)
        except ValueError as error:
            raise ValueError(f"{text!r}: {error or 'not understood'}; {hint}") from None
    if len(draws) == 1:
        return draws[0]
    return lambda rng: rng.choices(draws, weights)[0](rng)


def _parse_whole_numbers(text: str) -> Draw[float]:
    if ".." not in text:
        return _parse_numbers(text)
    low, high = _parse_range(text)
    return lambda rng: rng.randint(math.ceil(low), math.floor(high))


def _parse_numbers(text: str) -> Draw[float]:
    if ".." in text:
        low, high = _parse_range(text)
        return lambda rng: rng.uniform(low, high)
    name, *values = text.split(":")
    match name, [_parse_positive(value) for value in values]:
        case "normal", [mean, std]:
            return lambda rng: rng.gauss(mean, std)
        case "lognormal", [mean, std] if mean > 0:
            return _lognormal(mean, std)
        case "exponential", [mean] if mean > 0:
            return lambda rng: rng.expovariate(1 / mean)
        case _, []:
            value = _parse_positive(name)
            return lambda rng: value
    raise ValueError


def _parse_range(text: str) -> tuple[float, float]:
    low, high = (_parse_positive(end) for end in text.split("..", 1))
    if low > high:
        raise ValueError("the lower end comes first")
    return low, high


def _parse_positive(text: str) -> float:
    if (value := parse_number(text)) < 0:
        raise ValueError("a number is negative")
    return value


def _lognormal(mean: float, std: float) -> Draw[float]:
    """Return a lognormal distribution; mean and standard deviation are of the values, not of their logarithms."""
    sigma = math.sqrt(math.log1p((std / mean) ** 2))
    mu = math.log(mean) - sigma**2 / 2
    return lambda rng: rng.lognormvariate(mu, sigma)


def _parse_sizes(text: str) -> Draw[Size]:
    name, *values = text.split(":")
    if name == "lognormal" and len(values) == 2:
        (width, height), spread = _parse_size(values[0]), parse_factor(values[1])
        wide, high = _lognormal(width, spread * width), _lognormal(height, spread * height)
        return lambda rng: (_clamp_side(wide(rng)), _clamp_side(high(rng)))
    if values:
        raise ValueError
    size = _parse_size(name)
    return lambda rng: size


def _parse_size(text: str) -> Size:
    sides = text.lower().split("x")
    if len(sides) != 2 or not all(
        side.isascii() and side.isdigit() and 1 <= int(side) <= SIDES[1] for side in sides
    ):
        raise ValueError(f"not an image size of 1 to {SIDES[1]} pixels a side")
    return int(sides[0]), int(sides[1])


def _clamp_side(value: float) -> int:
    return min(max(round(value), SIDES[0]), SIDES[1])
