"""The schedule of a run: a workload's items as conversations, and the time of each conversation's first turn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from blake3 import blake3

from epd_serve.bench.arrivals import ClosedLoop, Load, Trace
from epd_serve.bench.types import Item, Media, Workload


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

    def schedule(self) -> list[tuple[int, float | None]]:
        """(index, planned time) of each request, by index; the time is None where it depends on answers."""
        times: list[tuple[int, float | None]] = []
        for chain in self.chains:
            times += [(item.index, None if item.turn else chain.at_s) for item in chain.items]
        return sorted(times)


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


def digest(items: Iterable[Item]) -> str:
    """blake3 over all that the items send; equal digests are equal workloads."""
    whole = blake3()
    for item in items:
        whole.update(repr((item.index, item.max_tokens, item.conversation, item.turn, item.think_s)).encode())
        whole.update(repr((item.arrival_s, sorted(item.fields.items()))).encode())
        for message in item.messages:
            whole.update(message.role.encode())
            for part in message.parts:
                if isinstance(part, Media):
                    whole.update(f"\0{part.mime}\0{part.url}\0{len(part.data)}\0".encode())
                    whole.update(part.data)
                else:
                    whole.update(part.encode())
    return whole.hexdigest()


def _arrival(item: Item) -> float:
    if item.arrival_s is None:
        raise ValueError(f"workload {item.workload} brings no times along; --arrivals trace is for traces")
    return item.arrival_s
