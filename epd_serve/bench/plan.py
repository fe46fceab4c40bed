"""The schedule of a run: arrivals, and conversations with the time of each first turn."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

from epd_serve.bench.types import Item, RunSettings, Workload

#: Arrivals that need a rate.
RATED = ("poisson", "constant", "gamma")


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """When requests are sent.

    Attributes:
        kind: one of RATED, "trace" (the workload's own times) or "closed".
        rate: mean requests per second.
        shape: shape of gamma-distributed gaps: 1 is a Poisson process, less is burstier.
        concurrency: users of a closed loop; each sends its next request after the last answer.
        time_scale: factor on a trace's times.
    """

    kind: str
    rate: float = 1.0
    shape: float = 1.0
    concurrency: int | None = None
    time_scale: float = 1.0

    def draw_times(self, count: int, seed: int) -> list[float]:
        """Return ascending seconds since the start of the schedule."""
        if self.kind == "constant":
            return [index / self.rate for index in range(count)]
        gaps = random.Random(seed)
        return list(accumulate(gaps.gammavariate(self.shape, 1 / (self.rate * self.shape)) for _ in range(count)))


def parse_arrivals(settings: RunSettings) -> Arrivals:
    """Read poisson, constant, gamma:SHAPE, trace or closed:CONCURRENCY. Raises ValueError with a remedy."""
    kind, _, value = settings.arrivals.partition(":")
    rate, time_scale = settings.rate, settings.time_scale
    if kind in RATED:
        if rate is None:
            raise ValueError(f"arrivals {settings.arrivals!r} need a rate; add --rate, as in --rate 4")
        if not 0 < rate < math.inf:
            raise ValueError(f"--rate must be a positive number, not {rate:g}")
        if kind == "gamma" and value.replace(".", "", 1).isdecimal() and (shape := float(value)):
            return Arrivals(kind=kind, rate=rate, shape=shape)
        if not value and kind != "gamma":
            return Arrivals(kind=kind, rate=rate)
    elif rate is not None:
        raise ValueError(f"arrivals {settings.arrivals!r} lack a single rate; leave --rate out")
    elif kind == "closed" and value.isdecimal() and int(value):
        return Arrivals(kind=kind, concurrency=int(value))
    elif settings.arrivals == "trace":
        if not 0 < time_scale < math.inf:
            raise ValueError(f"--time-scale must be a positive number, not {time_scale:g}")
        return Arrivals(kind=kind, time_scale=time_scale)
    raise ValueError(
        f"unknown arrivals {settings.arrivals!r}; write 'poisson', 'constant', 'gamma:0.5', 'trace' or 'closed:16'"
    )


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """The turns of one conversation; most workloads have one turn each.

    Attributes:
        at_s: time of the first turn; None in a closed loop.
    """

    turns: tuple[Item, ...]
    at_s: float | None


def take_items(workload: Workload, count: int | None, seed: int) -> list[Item]:
    """Return the first ``count`` items; None takes all.

    Raises ValueError for a workload without items, and for all items of an endless one.
    """
    if count is None:
        count = workload.num_items
        if count is None:
            raise ValueError(f"workload {workload.name} is endless; set --duration or --num-requests")
    items = list(islice(workload.items(seed), count))
    if not items:
        raise ValueError(f"workload {workload.name} contains no requests")
    return items


def schedule_items(items: Sequence[Item], arrivals: Arrivals, seed: int) -> list[Conversation]:
    """Return the conversations of ``items`` in order of time. Raises ValueError if a trace lacks times."""
    by_name: dict[str, list[Item]] = {}
    for item in items:
        key = f"alone {item.index}" if item.conversation is None else f"with {item.conversation}"
        by_name.setdefault(key, []).append(item)
    conversations = [tuple(sorted(some, key=lambda item: item.turn)) for some in by_name.values()]
    if arrivals.concurrency is not None:
        return [Conversation(turns=turns, at_s=None) for turns in conversations]
    if arrivals.kind != "trace":
        times = arrivals.draw_times(len(conversations), seed)
        return [Conversation(turns=turns, at_s=at_s) for turns, at_s in zip(conversations, times, strict=True)]
    timed: list[tuple[float, tuple[Item, ...]]] = []
    for turns in conversations:
        if turns[0].arrival_s is None:
            raise ValueError(f"workload {turns[0].workload} has no times; --arrivals trace needs a trace")
        timed.append((turns[0].arrival_s * arrivals.time_scale, turns))
    timed.sort(key=lambda pair: pair[0])
    return [Conversation(turns=turns, at_s=at_s) for at_s, turns in timed]
