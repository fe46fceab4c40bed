"""The schedule of a run: arrival processes, and conversations with the time of each first turn."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from epd_serve.bench.types import Item, RunSettings, Workload

_EXAMPLES = "'poisson', 'constant', 'gamma:0.5', 'trace' or 'closed:16'"


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
class Trace:
    """The times that the workload's items bring along, each multiplied by ``time_scale``."""

    time_scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ClosedLoop:
    """``concurrency`` users, each of whom sends the next request when the last one is answered."""

    concurrency: int


Load = Gamma | Constant | Trace | ClosedLoop


def parse_load(text: str, *, rate: float | None = None, time_scale: float = 1.0) -> Load:
    """Parse the text of ``--arrivals``.

    Args:
        text: poisson, constant, gamma:SHAPE, trace or closed:CONCURRENCY.
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
        case "trace", []:
            return Trace(time_scale=_positive(time_scale, "--time-scale"))
        case "closed", [concurrency] if concurrency.isdecimal() and int(concurrency) > 0:
            return ClosedLoop(concurrency=int(concurrency))
    raise ValueError(f"arrivals {text!r} are not known; write {_EXAMPLES}")


def load_of(settings: RunSettings) -> Load:
    """The arrivals of a run. Raises ValueError as :func:`parse_load`."""
    return parse_load(settings.arrivals, rate=settings.rate, time_scale=settings.time_scale)


def _number(text: str, whole: str) -> float:
    try:
        return _positive(float(text), f"arrivals {whole!r}: {text}")
    except ValueError:
        raise ValueError(f"arrivals {whole!r}: {text!r} is no positive number; write {_EXAMPLES}") from None


def _positive(value: float, name: str) -> float:
    if not (0 < value < math.inf):
        raise ValueError(f"{name} must be a positive number, not {value:g}")
    return value


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

    @property
    def num_items(self) -> int:
        return sum(len(chain.items) for chain in self.chains)


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
