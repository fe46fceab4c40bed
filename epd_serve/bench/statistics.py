"""Percentiles, distributions and the interval of a share, in plain Python."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from epd_serve.bench.types import Distribution, Share

#: Of the normal distribution, two-sided 95 %.
_Z = 1.959963984540054
#: Values that must lie beyond a percentile before it says more than "one of the largest".
_LEAST_BEYOND = 5


def percentile(ascending: Sequence[float], q: float) -> float:
    """Linear interpolation between closest ranks (numpy's default); ``q`` in 0..100, of one value or more."""
    at = (len(ascending) - 1) * q / 100
    below = math.floor(at)
    above = min(below + 1, len(ascending) - 1)
    return ascending[below] + (ascending[above] - ascending[below]) * (at - below)


def distribution(values: Iterable[float]) -> Distribution | None:
    """The distribution of the values; None where there are none."""
    ascending = sorted(values)
    if not ascending:
        return None
    mean = math.fsum(ascending) / len(ascending)
    variance = math.fsum((value - mean) ** 2 for value in ascending) / len(ascending)
    p50, p75, p90, p95, p99 = (percentile(ascending, q) for q in (50, 75, 90, 95, 99))
    return Distribution(
        n=len(ascending),
        mean=mean,
        std=math.sqrt(variance),
        min=ascending[0],
        max=ascending[-1],
        median=p50,
        p75=p75,
        p90=p90,
        p95=p95,
        p99=p99,
    )


def least_number(q: float) -> int:
    """The least number of values from which a percentile may be taken."""
    return math.ceil(_LEAST_BEYOND / (1 - q / 100) - 1e-9)


def wilson(part: int, whole: int) -> Share:
    """Wilson's score interval at 95 %: it holds near 0 and 1 and for few requests too."""
    if not whole:
        return Share(part=part, whole=whole, value=0.0, low=0.0, high=1.0)
    p, z2 = part / whole, _Z**2
    middle = p + z2 / (2 * whole)
    half = _Z * math.sqrt(p * (1 - p) / whole + z2 / (4 * whole**2))
    scale = 1 + z2 / whole
    return Share(
        part=part,
        whole=whole,
        value=p,
        low=0.0 if not part else max(0.0, (middle - half) / scale),
        high=1.0 if part == whole else min(1.0, (middle + half) / scale),
    )
