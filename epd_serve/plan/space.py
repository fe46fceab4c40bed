"""Enumerate candidate plans: topologies on the available devices, and batching options."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from epd_serve.config.sections import BatchingOrder
from epd_serve.plan.pools import Fleet, Pool
from epd_serve.topology import Topology, parse_topology
from epd_serve.topology.notation import width_of

#: Default for the sequences of a step.
MOST_SEQS = 256
#: With several kinds of devices, up to this many in total, plans may leave any number unused.
_FEW_DEVICES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A plan.

    Attributes:
        line: topology line.
        pools: pairs of a pool's index and its number of devices, in the order of the topology.
        max_num_tokens: None: a default for the devices.
    """

    line: str
    pools: tuple[tuple[int, int], ...]
    order: BatchingOrder = "fcfs"
    max_num_seqs: int = MOST_SEQS
    max_num_tokens: int | None = None

    @property
    def topology(self) -> Topology:
        return _parse_cached(self.line)

    @property
    def placed(self) -> tuple[str, tuple[tuple[int, int], ...]]:
        """The topology line and the pools, without batching options."""
        return self.line, self.pools

    @property
    def is_monolithic(self) -> bool:
        return all(str(member.role) == "EPD" for member in self.topology.members)

    def __str__(self) -> str:
        order = "" if self.order == "fcfs" else f" {self.order}"
        seqs = "" if self.max_num_seqs == MOST_SEQS else f" {self.max_num_seqs} seqs"
        tokens = "" if self.max_num_tokens is None else f" {self.max_num_tokens} tokens"
        return f"{self.line}{order}{seqs}{tokens}"

    def cost(self, fleet: Fleet) -> float:
        return sum(fleet.pools[index].price * count for index, count in self.pools)

    def step_tokens(self, fleet: Fleet) -> int:
        """Token budget of a step."""
        on_cpu = all(fleet.pools[index].kind == "cpu" for index, _ in self.pools)
        return self.max_num_tokens or (2048 if on_cpu else 8192)

    def describe(self, fleet: Fleet) -> str:
        """Return text, with devices if there are several kinds: ``E on a100, 2PD on h200``."""
        if len(fleet.pools) == 1:
            return str(self)
        by_pool: dict[str, list[str]] = {}
        devices = self.devices(fleet)
        for unit in self.topology.units:  # each lies in one pool
            by_pool.setdefault(devices[0][0].device, []).append(str(unit))
            devices = devices[unit.count * width_of(unit) :]
        where = ", ".join(f"{'-'.join(units)} on {device}" for device, units in by_pool.items())
        return where + str(self).removeprefix(self.line)

    def devices(self, fleet: Fleet) -> list[tuple[Pool, str]]:
        return [
            (fleet.pools[index], name) for index, count in self.pools for name in fleet.pools[index].names[:count]
        ]


_parse_cached = lru_cache(maxsize=4096)(parse_topology)


def _counted(count: int, unit: str) -> str:
    return f"{count if count > 1 else ''}{unit}"


def three_methods(num_instances: int) -> list[str]:
    """Return TriInfer's topologies (section 5.4): E-P-D, EP-D and ED-P in all ratios; 35 for 8 instances."""
    if num_instances < 2:
        return []
    lines = [
        f"{_counted(e, 'E')}-{_counted(p, 'P')}-{_counted(num_instances - e - p, 'D')}"
        for e in range(1, num_instances - 1)
        for p in range(1, num_instances - e)
    ]
    for one, other in (("EP", "D"), ("ED", "P")):
        lines += [f"{_counted(n, one)}-{_counted(num_instances - n, other)}" for n in range(1, num_instances)]
    return lines


def all_methods(num_devices: int) -> list[str]:
    """Return TriInfer's topologies, monolithic ones, and E co-located with P, D or PD (EPD-Serve, section 4)."""
    lines = [_counted(num_devices, "EPD"), _counted(num_devices, "(E-PD)"), *three_methods(num_devices)]
    for one, other in (("E", "PD"), ("(E-P)", "D"), ("(E-D)", "P")):
        lines += [f"{_counted(n, one)}-{_counted(num_devices - n, other)}" for n in range(1, num_devices)]
    return lines


def with_widths(lines: Sequence[str], widths: Sequence[int], num_devices: int) -> list[str]:
    """Return ``lines``, plus lines whose language model instances all have one of the tensor-parallel widths."""
    found = list(lines)
    for width in widths:
        if width > 1 and num_devices % width == 0 and num_devices // width >= 1:
            found += [
                f"{_counted(num_devices // width, f'EPD@tp{width}')}",
                *(
                    f"{_counted(p, f'P@tp{width}')}-{_counted(d, f'D@tp{width}')}-{_counted(e, 'E')}"
                    for e in range(1, num_devices)
                    for p in range(1, num_devices)
                    for d in range(1, num_devices)
                    if e + width * (p + d) == num_devices
                ),
            ]
    return found


def candidates(fleet: Fleet, *, widths: Sequence[int] = (1,), fewer: bool = False) -> Iterator[Candidate]:
    """Yield plans on one pool, monolithic plans on all pools, and plans where one pool encodes for another.

    Args:
        fewer: whether to include plans that leave devices unused.
    """
    for index, pool in enumerate(fleet.pools):
        for count in range(1 if fewer else pool.count, pool.count + 1):
            for line in with_widths(all_methods(count), widths, count):
                yield Candidate(line=line, pools=((index, count),))
    if len(fleet.pools) > 1:
        counts = tuple((index, pool.count) for index, pool in enumerate(fleet.pools))
        yield Candidate(line=monolithic(counts), pools=counts)
    for encoding, first in enumerate(fleet.pools):
        for rest, second in enumerate(fleet.pools):
            if encoding == rest:
                continue
            few = fewer and fleet.num_devices <= _FEW_DEVICES
            for num_rest in range(1 if few else second.count, second.count + 1):
                yield from _across(encoding, first.count, rest, num_rest)


def monolithic(pools: Sequence[tuple[int, int]]) -> str:
    """Return the topology of monolithic instances on these devices."""
    return "-".join(_counted(count, "EPD") for _, count in pools)


def _across(encoding: int, num_encoders: int, rest: int, num_rest: int) -> Iterator[Candidate]:
    """Yield plans with encoders on one pool and the language model on another (HeteroServe, section 5).

    The rest of the first pool holds PD instances or stays unused.
    """
    for e in _some(num_encoders):
        heads = [f"{_counted(e, 'E')}"]
        if num_encoders > e:
            heads.append(f"{_counted(e, 'E')}-{_counted(num_encoders - e, 'PD')}")
        tails = [_counted(num_rest, "PD"), _counted(num_rest, "EPD")]
        tails += [f"{_counted(p, 'P')}-{_counted(num_rest - p, 'D')}" for p in _some(num_rest - 1) if p < num_rest]
        for number, head in enumerate(heads):
            for tail in tails:
                used = num_encoders if number else e
                yield Candidate(line=f"{head}-{tail}", pools=((encoding, used), (rest, num_rest)))


def _some(most: int) -> list[int]:
    """Return numbers from 1 to ``most``: all if few, else in steps of about 20 %."""
    if most <= 8:
        return list(range(1, most + 1))
    found = {1, most}
    value = 1.0
    while value < most:
        found.add(round(value))
        value = max(value + 1, value * 1.2)
    return sorted(found)


def with_batching(
    found: Iterable[Candidate],
    orders: Sequence[BatchingOrder] = ("fcfs",),
    seqs: Sequence[int] = (MOST_SEQS,),
    tokens: Sequence[int | None] = (None,),
) -> list[Candidate]:
    """Return each plan with every combination of batching options."""
    return [
        replace(one, order=order, max_num_seqs=most, max_num_tokens=num_tokens)
        for one in found
        for order, most, num_tokens in product(orders, seqs, tokens)
    ]
