"""The schedule of a run: arrival processes, and conversations with the time of each first turn."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

from epd_serve.bench.types import Item, RunSettings, Workload


@dataclass(frozen=True, kw_only=True)
class Gamma:
    """An open loop: independent gaps with a gamma distribution, ``rate`` requests a second on average.

    Attributes:
        shape: 1 is a Poisson process; below 1 requests come in bursts, above 1 more evenly.
    """

    rate: float
    shape: float = 1.0

    def times(self, count: int, seed: int) -> list[float]:
        """Return ascending seconds from the plan's begin."""
        gaps = random.Random(seed)
        return list(accumulate(gaps.gammavariate(self.shape, 1 / (self.rate * self.shape)) for _ in range(count)))


@dataclass(frozen=True, kw_only=True)
class Constant:
    """An open loop of equal gaps; the first request comes at 0."""

    rate: float

    def times(self, count: int, seed: int) -> list[float]:
        return [index / self.rate for index in range(count)]


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The times that the workload's items bring along, each multiplied by ``time_scale``."""

    time_scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ClosedLoop:
    """``concurrency`` users, each of whom sends the next request when the last one is answered."""

    concurrency: int


Load = Gamma | Constant | Trace | ClosedLoop


def load_of(settings: RunSettings) -> Load:
    """Return the arrivals of a run: poisson, constant, gamma:SHAPE, trace or closed:CONCURRENCY, as typed.

    Raises ValueError that says what would be right.
    """
    kind, _, value = settings.arrivals.partition(":")
    rate = settings.rate
    if kind in ("poisson", "constant", "gamma"):
        if rate is None:
            raise ValueError(f"arrivals {settings.arrivals!r} need a rate; add --rate, as in --rate 4")
        if not 0 < rate < math.inf:
            raise ValueError(f"--rate must be a positive number, not {rate:g}")
        if kind == "gamma" and (shape := _positive(value)):
            return Gamma(rate=rate, shape=shape)
        if not value and kind != "gamma":
            return Gamma(rate=rate) if kind == "poisson" else Constant(rate=rate)
    elif rate is not None:
        raise ValueError(f"arrivals {settings.arrivals!r} have no single rate; leave --rate out")
    elif kind == "closed" and value.isdecimal() and int(value):
        return ClosedLoop(concurrency=int(value))
    elif settings.arrivals == "trace":
        if not 0 < settings.time_scale < math.inf:
            raise ValueError(f"--time-scale must be a positive number, not {settings.time_scale:g}")
        return Trace(time_scale=settings.time_scale)
    raise ValueError(
        f"arrivals {settings.arrivals!r} are not known; write 'poisson', 'constant', 'gamma:0.5', 'trace' or "
        "'closed:16'"
    )


def _positive(text: str) -> float:
    """Return a positive number; 0 where the text is none."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0 < value < math.inf else 0.0


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The turns of one conversation; a single request in most workloads.

    Attributes:
        at_s: time of the first turn; None in a closed loop.
    """

    items: tuple[Item, ...]
    at_s: float | None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Attributes:
    chains: sorted by at_s; in a closed loop, in the order in which they are sent.
    concurrency: number of users of a closed loop; None in an open one.
    time_scale: factor on the times that items bring along.
    """

    chains: Sequence[Chain]
    concurrency: int | None = None
    time_scale: float = 1.0


def take_items(workload: Workload, count: int | None, seed: int) -> list[Item]:
    """Return the first ``count`` items, or all.

    Raises ValueError for a workload without items, and where all items of an endless one are wanted.
    """
    if count is None:
        count = workload.num_items
        if count is None:
            raise ValueError(f"workload {workload.name} has no end; say how many requests with --num-requests")
    items = list(islice(workload.items(seed), count))
    if not items:
        raise ValueError(f"workload {workload.name} has no requests")
    return items


def make_plan(items: Sequence[Item], load: Load, seed: int) -> Plan:
    """Raises ValueError where the load needs times that the items lack."""
    conversations: dict[str, list[Item]] = {}
    for item in items:
        key = f"alone {item.index}" if item.conversation is None else f"with {item.conversation}"
        conversations.setdefault(key, []).append(item)
    turns = [tuple(sorted(some, key=lambda item: item.turn)) for some in conversations.values()]
    if isinstance(load, ClosedLoop):
        chains = [Chain(items=some, at_s=None) for some in turns]
        return Plan(chains=chains, concurrency=load.concurrency)
    if isinstance(load, Trace):
        chains = [Chain(items=some, at_s=_arrival(some[0]) * load.time_scale) for some in turns]
        return Plan(chains=sorted(chains, key=lambda chain: chain.at_s or 0.0), time_scale=load.time_scale)
    times = load.times(len(turns), seed)
    return Plan(chains=[Chain(items=some, at_s=at_s) for some, at_s in zip(turns, times, strict=True)])


def _arrival(item: Item) -> float:
    if item.arrival_s is None:
        raise ValueError(f"workload {item.workload} brings no times along; --arrivals trace is for traces")
    return item.arrival_s
