"""Counters and histograms for a hot path: plain numbers of one thread, Prometheus's families when asked.

Those of several processes are shown as those of one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import msgspec
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

Labels = tuple[str, ...]


class Tally:
    """One histogram series."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, how many are no greater) as Prometheus has it."""
        total, found = 0, []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self.counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found


class Histogram:
    """A family of tallies under one or more names; a series is there once it is asked for."""

    def __init__(
        self, names: str | Sequence[str], text: str, bounds: Sequence[float], labels: Sequence[str] = ()
    ) -> None:
        self._names = [names] if isinstance(names, str) else names
        self._text = text
        self._bounds = [float(bound) for bound in bounds]
        self._labels = labels
        self._series: dict[Labels, Tally] = {}
        if not labels:
            self.series()

    def series(self, *values: str) -> Tally:
        tally = self._series.get(values)
        if tally is None:
            tally = self._series[values] = Tally(self._bounds)
        return tally

    def observe(self, value: float, *labels: str) -> None:
        tally = self._series.get(labels)
        if tally is None:
            tally = self.series(*labels)
        tally.counts[bisect_left(self._bounds, value)] += 1
        tally.sum += value

    def collect(self) -> Iterator[Metric]:
        for name in self._names:
            family = HistogramMetricFamily(name, self._text, labels=self._labels)
            for values, tally in self._series.items():
                family.add_metric(values, tally.buckets(), tally.sum)
            yield family


class Counter:
    """A family of sums. ``start`` gives the series that are there from the beginning, at 0."""

    def __init__(self, name: str, text: str, labels: Sequence[str] = (), start: Iterable[Labels] = ()) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._series: dict[Labels, float] = dict.fromkeys(start if labels else [()], 0.0)

    def add(self, value: float, *labels: str) -> None:
        self._series[labels] = self._series.get(labels, 0.0) + value

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, total in self._series.items():
            family.add_metric(values, total)
        yield family


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
