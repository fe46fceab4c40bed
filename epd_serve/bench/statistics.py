"""Percentiles, distributions, confidence intervals and concurrency over time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate

from epd_serve.bench.types import Distribution, Record, Share

#: Two-sided 95 % of the normal distribution.
_Z = 1.959963984540054
#: With fewer values beyond it a percentile is just one of the largest values.
_MIN_BEYOND = 5


def percentile(ascending: Sequence[float], q: float) -> float:
    """Return a percentile of at least one value, interpolated linearly like numpy's; ``q`` is in 0..100."""
    at = (len(ascending) - 1) * q / 100
    below = math.floor(at)
    above = min(below + 1, len(ascending) - 1)
    return ascending[below] + (ascending[above] - ascending[below]) * (at - below)


def distribution(values: Iterable[float]) -> Distribution | None:
    """Return the distribution of the values; None without values."""
    ascending = sorted(values)
    if not ascending:
        return None
    mean = math.fsum(ascending) / len(ascending)
    variance = math.fsum((value - mean) ** 2 for value in ascending) / len(ascending)
    return Distribution(
        n=len(ascending),
        mean=mean,
        std=math.sqrt(variance),
        min=ascending[0],
        max=ascending[-1],
        median=percentile(ascending, 50),
        **{f"p{q}": percentile(ascending, q) for q in (75, 90, 95, 99)},
    )


def min_values(q: float) -> int:
    """Return how many values a percentile needs to be meaningful."""
    return math.ceil(_MIN_BEYOND / (1 - q / 100) - 1e-9)


def wilson(part: int, whole: int) -> Share:
    """Return a share with its 95 % Wilson score interval, which also holds near 0 and 1 and for few requests."""
    if not whole:
        return Share(part=part, whole=whole, value=0.0, low=0.0, high=1.0)
    p, z2 = part / whole, _Z**2
    middle = p + z2 / (2 * whole)
    half = _Z * math.sqrt(p * (1 - p) / whole + z2 / (4 * whole**2))
    scale = 1 + z2 / whole
    low, high = max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)
    return Share(part=part, whole=whole, value=p, low=low if part else 0.0, high=high if part < whole else 1.0)


def load_curve(records: Sequence[Record]) -> list[tuple[float, int]]:
    """Return (time, open requests from then on), ascending in time."""
    events = sorted(
        event
        for record in records
        if record.sent_s is not None
        for event in ((record.sent_s, 1), (record.finish_s, -1))
    )
    numbers = accumulate(change for _, change in events)
    return [(at_s, number) for (at_s, _), number in zip(events, numbers, strict=True)]


def mean_concurrency(curve: Sequence[tuple[float, int]], begin_s: float, end_s: float) -> float:
    """Return the mean number of open requests over ``[begin_s, end_s)``."""
    if end_s <= begin_s:
        return 0.0
    area, number, since_s = 0.0, 0, begin_s
    for at_s, after in curve:
        if at_s >= end_s:
            break
        if at_s > since_s:
            area += number * (at_s - since_s)
            since_s = at_s
        number = after
    return (area + number * (end_s - since_s)) / (end_s - begin_s)


def is_growing(curve: Sequence[tuple[float, int]], begin_s: float, end_s: float) -> bool:
    """Return whether open requests kept growing, which means that the server cannot keep up."""
    third_s = (end_s - begin_s) / 3
    parts = [
        mean_concurrency(curve, begin_s + part * third_s, begin_s + (part + 1) * third_s) for part in range(3)
    ]
    return parts[0] * 1.25 < parts[1] and parts[1] * 1.15 < parts[2] and parts[2] > parts[0] + 3
