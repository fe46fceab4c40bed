"""Numbers and image sizes drawn from a distribution that is written as a short text.

==========================  ====================================================
``64``                      always
``16..128``                 uniform, both ends included
``normal:64:16``            mean and standard deviation
``lognormal:64:32``         the same of a lognormal: a few are much longer
``exponential:64``          mean
``32@0.9+512@0.1``          one of several, by weight
``802x652``                 an image size, width first
``lognormal:802x652:0.35``  sizes of this mean; 0.35 is the standard deviation of either side, as a part of it
``640x480@3+1280x720``      one of several sizes, by weight (1 where none is written)
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
#: Sides of images that are drawn stay in this range.
SIDES = (28, 8192)
#: A distribution.
Draw: TypeAlias = Callable[[Random], Value]


def parse_lengths(text: str, *, at_least: int = 1) -> Draw[int]:
    """Read a distribution of whole numbers. Raises ValueError that says what can be written."""
    numbers = _mixture(text, _lengths, _LENGTHS)
    return lambda rng: max(at_least, round(numbers(rng)))


def parse_seconds(text: str) -> Draw[float]:
    """Read a distribution of times; none is below 0."""
    numbers = _mixture(text, _numbers, _LENGTHS)
    return lambda rng: max(0.0, numbers(rng))


def parse_sizes(text: str) -> Draw[Size]:
    """Read a distribution of image sizes, (width, height) in pixels."""
    return _mixture(text, _sizes, _SIZES)


_LENGTHS = "write a number, LOW..HIGH, normal:MEAN:STD, lognormal:MEAN:STD, exponential:MEAN or A@WEIGHT+B@WEIGHT"
_SIZES = "write WIDTHxHEIGHT, lognormal:WIDTHxHEIGHT:SPREAD or A@WEIGHT+B@WEIGHT"


def _mixture(text: str, parse: Callable[[str], Draw[Value]], hint: str) -> Draw[Value]:
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


def _lengths(text: str) -> Draw[float]:
    if ".." in text:
        low, high = _ends(text)
        return lambda rng: rng.randint(math.ceil(low), math.floor(high))
    return _numbers(text)


def _numbers(text: str) -> Draw[float]:
    if ".." in text:
        low, high = _ends(text)
        return lambda rng: rng.uniform(low, high)
    name, *values = text.split(":")
    match name, [_number(value) for value in values]:
        case "normal", [mean, std]:
            return lambda rng: rng.gauss(mean, std)
        case "lognormal", [mean, std] if mean > 0:
            return _lognormal(mean, std)
        case "exponential", [mean] if mean > 0:
            return lambda rng: rng.expovariate(1 / mean)
        case _, []:
            value = _number(name)
            return lambda rng: value
    raise ValueError


def _ends(text: str) -> tuple[float, float]:
    low, high = (_number(end) for end in text.split("..", 1))
    if low > high:
        raise ValueError("the lower end comes first")
    return low, high


def _lognormal(mean: float, std: float) -> Draw[float]:
    """A lognormal distribution with this mean and standard deviation of the values, not of their logarithms."""
    sigma = math.sqrt(math.log1p((std / mean) ** 2))
    mu = math.log(mean) - sigma**2 / 2
    return lambda rng: rng.lognormvariate(mu, sigma)


def _sizes(text: str) -> Draw[Size]:
    name, *values = text.split(":")
    if name == "lognormal" and len(values) == 2:
        (width, height), spread = _size(values[0]), parse_factor(values[1])
        wide, high = _lognormal(width, spread * width), _lognormal(height, spread * height)
        return lambda rng: (_side(wide(rng)), _side(high(rng)))
    if values:
        raise ValueError
    size = _size(name)
    return lambda rng: size


def _size(text: str) -> Size:
    sides = text.lower().split("x")
    if len(sides) != 2 or not all(
        side.isascii() and side.isdigit() and 1 <= int(side) <= SIDES[1] for side in sides
    ):
        raise ValueError(f"no image size of 1 to {SIDES[1]} pixels a side")
    return int(sides[0]), int(sides[1])


def _side(value: float) -> int:
    return min(max(round(value), SIDES[0]), SIDES[1])


def _number(text: str) -> float:
    if (value := parse_number(text)) < 0:
        raise ValueError("a number is negative")
    return value
