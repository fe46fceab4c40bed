"""Arrival processes of requests: open-loop processes, ramps, traces, and the closed loop, which has no times."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

_EXAMPLES = "'poisson', 'constant', 'gamma:0.5', 'ramp:1:12', 'trace' or 'closed:16'"


@dataclass(frozen=True, kw_only=True)
class Gamma:
    """Independent gaps with a gamma distribution, ``rate`` requests a second on average.

    An open loop, as the next two: requests come whether or not those before were answered.

    Attributes:
        shape: 1 is a Poisson process; below 1 requests come in bursts, above 1 more evenly.
    """

    rate: float
    shape: float = 1.0

    def times(self, count: int, seed: int) -> Iterator[float]:
        """``count`` ascending seconds from the plan's begin; the same seed gives the same ones."""
        gaps = random.Random(seed)
        scale = 1 / (self.rate * self.shape)
        at_s = 0.0
        for _ in range(count):
            at_s += gaps.gammavariate(self.shape, scale)
            yield at_s


@dataclass(frozen=True, kw_only=True)
class Constant:
    """Equal gaps; the first request comes at 0."""

    rate: float

    def times(self, count: int, seed: int) -> Iterator[float]:
        return (index / self.rate for index in range(count))


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """A Poisson process whose rate goes evenly from ``begin`` to ``end`` while the requests are sent."""

    begin: float
    end: float

    @property
    def rate(self) -> float:
        return (self.begin + self.end) / 2

    def times(self, count: int, seed: int) -> Iterator[float]:
        gaps = random.Random(seed)
        slope = (self.end - self.begin) * self.rate / count  # over count / rate seconds
        passed = 0.0
        for _ in range(count):
            passed += gaps.expovariate(1.0)
            yield self._when(passed, slope, count / self.rate)

    def _when(self, passed: float, slope: float, length_s: float) -> float:
        """Seconds until ``passed`` requests are expected.

        Solves begin·t + slope·t²/2 = passed; past the ramp the rate stays at its end.
        """
        at_end = self.rate * length_s
        if passed >= at_end:
            return length_s + (passed - at_end) / self.end
        if abs(slope) < 1e-12:
            return passed / self.begin
        return (math.sqrt(self.begin**2 + 2 * slope * passed) - self.begin) / slope


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The times that the workload's items bring along, each multiplied by ``time_scale``."""

    time_scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ClosedLoop:
    """``concurrency`` users, each of whom sends the next request when the last one is answered."""

    concurrency: int


Load = Gamma | Constant | Ramp | Trace | ClosedLoop


def parse_load(text: str, *, rate: float | None = None, time_scale: float = 1.0) -> Load:
    """Parse the text of ``--arrivals``.

    Args:
        text: poisson, constant, gamma:SHAPE, ramp:FROM:TO, trace or closed:CONCURRENCY.
        rate: requests a second; needed by the first three.

    Raises ValueError that says what would be right.
    """
    kind, *values = text.split(":")
    if kind in ("poisson", "constant", "gamma"):
        if rate is None:
            raise ValueError(f"arrivals {text!r} need a rate; add --rate, as in --rate 4")
        _positive(rate, "--rate")
    elif rate is not None:
        raise ValueError(f"arrivals {text!r} have no single rate; leave --rate out")
    match kind, values:
        case "poisson", []:
            assert rate is not None
            return Gamma(rate=rate)
        case "constant", []:
            assert rate is not None
            return Constant(rate=rate)
        case "gamma", [shape]:
            assert rate is not None
            return Gamma(rate=rate, shape=_number(shape, text))
        case "ramp", [begin, end]:
            return Ramp(begin=_number(begin, text), end=_number(end, text))
        case "trace", []:
            return Trace(time_scale=_positive(time_scale, "--time-scale"))
        case "closed", [concurrency] if concurrency.isdecimal() and int(concurrency) > 0:
            return ClosedLoop(concurrency=int(concurrency))
    raise ValueError(f"arrivals {text!r} are not known; write {_EXAMPLES}")


def _number(text: str, whole: str) -> float:
    try:
        return _positive(float(text), f"arrivals {whole!r}: {text}")
    except ValueError:
        raise ValueError(f"arrivals {whole!r}: {text!r} is no positive number; write {_EXAMPLES}") from None


def _positive(value: float, name: str) -> float:
    if not (0 < value < math.inf):
        raise ValueError(f"{name} must be a positive number, not {value:g}")
    return value
