"""Percentiles, distributions, the interval of a share, and the stable part of a run: neither filling up nor
draining."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate

from epd_serve.bench.types import Distribution, Record, Share

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


#: Requests below which a window says nothing.
LEAST_REQUESTS = 10
#: The filling takes at most this part of the time in which requests are sent.
_LONGEST_FILL = 0.25


def load_curve(records: Sequence[Record]) -> list[tuple[float, int]]:
    """(time, requests on their way from then on), ascending in time."""
    spans = _spans(records)
    events = sorted(event for sent_s, finish_s in spans for event in ((sent_s, 1), (finish_s, -1)))
    numbers = accumulate(change for _, change in events)
    return [(at_s, number) for (at_s, _), number in zip(events, numbers, strict=True)]


def _spans(records: Sequence[Record]) -> list[tuple[float, float]]:
    """(time of the sending, time of the end) of the requests that were sent, in the order of their sending."""
    return sorted((record.sent_s, record.finish_s) for record in records if record.sent_s is not None)


def mean_concurrency(curve: Sequence[tuple[float, int]], begin_s: float, end_s: float) -> float:
    """Requests on their way, on average over ``[begin_s, end_s)``."""
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


def stable_window(records: Sequence[Record], concurrency: int | None) -> tuple[float, float] | None:
    """``[begin_s, end_s)`` by the time of the sending; None where too few requests lie in it.

    Closed loop: from when all users were at work and one request of each had been answered, to when a user found
    nothing more to send. Open loop: from one median latency after the first request (by Little's law a server that
    keeps up has then as many requests as it will have), to the last request that was sent.
    """
    spans = _spans(records)
    if len(spans) < LEAST_REQUESTS:
        return None
    times = [sent_s for sent_s, _ in spans]
    if concurrency is not None:
        if len(spans) < 2 * concurrency:
            return None
        begin_s = max(times[concurrency - 1], max(finish_s for _, finish_s in spans[:concurrency]))
        end_s = times[-1]
    else:
        latencies = sorted(finish_s - sent_s for sent_s, finish_s in spans)
        fill_s = min(latencies[len(latencies) // 2], _LONGEST_FILL * (times[-1] - times[0]))
        begin_s, end_s = times[0] + fill_s, times[-1]
    within = sum(begin_s <= at_s < end_s for at_s in times)
    return (begin_s, end_s) if within >= LEAST_REQUESTS else None


def is_growing(curve: Sequence[tuple[float, int]], begin_s: float, end_s: float) -> bool:
    """Whether the requests on their way became more throughout: then the server does not keep up."""
    third_s = (end_s - begin_s) / 3
    parts = [
        mean_concurrency(curve, begin_s + part * third_s, begin_s + (part + 1) * third_s) for part in range(3)
    ]
    return parts[0] * 1.25 < parts[1] and parts[1] * 1.15 < parts[2] and parts[2] > parts[0] + 3
