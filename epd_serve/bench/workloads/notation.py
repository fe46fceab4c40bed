"""The notation of workloads: ``NAME[:FILE][,KEY=VALUE...]``, the values, and lines of a workload's file.

A number or an image size is drawn from a distribution:

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

import difflib
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TypeAlias, TypeVar

import msgspec

Value = TypeVar("Value")
_KEY = re.compile(r",([a-z_]+)=")


@dataclass(slots=True)
class Options:
    """The settings of one workload: take each, then check that none is left."""

    values: Mapping[str, str]
    _known: list[str] = field(default_factory=list)

    def take(self, key: str, parse: Callable[[str], Value], default: str) -> Value:
        """Return a parsed setting. Raises ValueError that names the key of an invalid value."""
        self._known.append(key)
        try:
            return parse(self.values.get(key, default))
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None

    def check(self, workload: str) -> None:
        """Raise ValueError for keys that were not taken."""
        if unknown := [key for key in self.values if key not in self._known]:
            raise ValueError(f"workload {workload} lacks setting {unknown[0]!r}; known: {', '.join(self._known)}")


def split_spec(spec: str) -> tuple[str, Path | None, Options]:
    """Return (name, file, settings). A comma is part of the file name unless KEY= follows."""
    start, *rest = _KEY.split(spec)
    name, colon, file = start.partition(":")
    if colon and not file:
        raise ValueError(f"workload {spec!r} names no file; write {name}:FILE.jsonl")
    if twice := sorted({key for key in rest[::2] if rest[::2].count(key) > 1}):
        raise ValueError(f"workload setting {', '.join(twice)} is given twice")
    values = dict(zip(rest[::2], rest[1::2], strict=True))
    return name.strip(), Path(file).expanduser() if file else None, Options(values)


def parse_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is not a number")
    return value


def parse_share(text: str) -> float:
    if not 0 <= (value := parse_number(text)) <= 1:
        raise ValueError(f"{text!r} is not a share; write a number from 0 to 1")
    return value


def parse_factor(text: str) -> float:
    if (value := parse_number(text)) <= 0:
        raise ValueError(f"{text!r} is not a factor; write a number above 0")
    return value


def parse_switch(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(f"{text!r}; write true or false")
    return text.lower() == "true"


def parse_count(text: str) -> int | None:
    """Read a number of requests; "" stands for all and returns None."""
    if not text:
        return None
    if not (text.isascii() and text.isdigit()) or not int(text):
        raise ValueError(f"{text!r} is not a count; write a whole number above 0")
    return int(text)


def read_lines(path: Path, parse: Callable[[int, dict[str, Any]], Value]) -> list[Value]:
    """Call ``parse`` with the number and the object of each non-empty line; return the results.

    Raises ValueError with the file and the line of a fault.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                found.append(parse(number, msgspec.json.decode(line, type=dict[str, Any])))
            except (ValueError, msgspec.MsgspecError) as error:
                raise ValueError(f"{path}:{number}: {error}") from None
    if not found:
        raise ValueError(f"{path} contains no requests; write one JSON object per line")
    return found


def check_keys(line: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise ValueError for a key that looks misspelt; further keys of datasets are ignored."""
    for key in line:
        if key not in known and (alike := difflib.get_close_matches(key, known, n=1, cutoff=0.8)):
            raise ValueError(f"unknown key {key!r}; did you mean {alike[0]!r}?")


Size = tuple[int, int]
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
