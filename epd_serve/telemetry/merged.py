"""Metrics of several processes shown as those of one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

import msgspec
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

#: Kinds whose samples only grow; those of a process that has ended stay in the sum.
_CUMULATIVE = ("counter", "histogram")


#: (name of the sample, labels in the order of the family)
_Series = tuple[str, tuple[tuple[str, str], ...]]


class Family(msgspec.Struct, array_like=True, frozen=True):
    """A metric with its samples: (name, labels, value)."""

    name: str
    text: str
    kind: str
    samples: list[tuple[str, dict[str, str], float]]


def families_of(registry: Collector) -> list[Family]:
    """All that a registry has, as of now."""
    found = []
    for metric in registry.collect():
        samples = [(one.name, one.labels, one.value) for one in metric.samples]
        found.append(Family(metric.name, metric.documentation, metric.type, samples))
    return found


def merge(parts: Iterable[list[Family]], summed: Collection[str] = ()) -> list[Family]:
    """One family for each name: counters and histograms added up, as are the gauges named in ``summed``; of other
    gauges the greatest value, of times of creation the earliest."""
    merged: dict[str, tuple[Family, dict[_Series, float]]] = {}
    for part in parts:
        for family in part:
            _, found = merged.setdefault(family.name, (family, {}))
            for name, labels, value in family.samples:
                series = (name, tuple(labels.items()))
                join = _join(name, family, summed)
                found[series] = join(found[series], value) if series in found else value
    return [
        Family(
            family.name,
            family.text,
            family.kind,
            [(name, dict(labels), value) for (name, labels), value in found.items()],
        )
        for family, found in merged.values()
    ]


def cumulative(families: Iterable[Family], growing: Collection[str] = ()) -> list[Family]:
    """The families that must outlive their process; ``growing`` are the gauges among them."""
    return [family for family in families if family.kind in _CUMULATIVE or family.name in growing]


def exposition(families: Iterable[Family]) -> bytes:
    """The text that Prometheus reads."""
    return generate_latest(_Fixed(list(families)))


class _Fixed(Collector):
    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.text, family.kind)
            for name, labels, value in family.samples:
                metric.add_sample(name, labels, value)
            yield metric


def _join(name: str, family: Family, summed: Collection[str]) -> Callable[[float, float], float]:
    if name.endswith("_created"):
        return min
    return _add if family.kind in _CUMULATIVE or family.name in summed else max


def _add(one: float, other: float) -> float:
    return one + other
