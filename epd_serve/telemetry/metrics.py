"""Counters and histograms for a hot path: plain numbers of one thread, Prometheus's families when asked.

Those of several processes are shown as those of one.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import msgspec
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

Labels = tuple[str, ...]
_MAX_UNSORTED = 1024


class Histogram:
    """A family of histograms under one or more names; a series is there once it is asked for."""

    def __init__(
        self, names: str | Sequence[str], text: str, bounds: Sequence[float], labels: Sequence[str] = ()
    ) -> None:
        self._names = [names] if isinstance(names, str) else names
        self._text = text
        self._bounds = [float(bound) for bound in bounds]
        self._labels = labels
        #: By series: values that are in no bucket yet; counts up to each bound and in all; their sum.
        self._series: dict[Labels, tuple[list[float], list[int], list[float]]] = {}
        if not labels:
            self.series()

    def series(self, *values: str) -> None:
        """Have a series that nothing was observed of."""
        self._series[values] = [], [0] * (len(self._bounds) + 1), [0.0]

    def observe(self, value: float, *labels: str) -> None:
        series = self._series.get(labels)
        if series is None:
            self.series(*labels)
            series = self._series[labels]
        values = series[0]
        values.append(value)
        if len(values) >= _MAX_UNSORTED:
            self._sort(labels)

    def collect(self) -> Iterator[Metric]:
        for name in self._names:
            family = HistogramMetricFamily(name, self._text, labels=self._labels)
            for labels in self._series:
                counts, total = self._sort(labels)
                bounds = (*map(str, self._bounds), "+Inf")
                family.add_metric(labels, list(zip(bounds, map(float, counts), strict=True)), total)
            yield family

    def _sort(self, labels: Labels) -> tuple[list[int], float]:
        """Count what was observed: together, which is less work than one by one."""
        values, counts, total = self._series[labels]
        values.sort()
        for index, bound in enumerate(self._bounds):
            counts[index] += bisect_right(values, bound)
        counts[-1] += len(values)
        total[0] += sum(values)
        values.clear()
        return counts, total[0]


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


class VllmNames:
    """Three gauges under the names by which routers that were written for vLLM read a server's load."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._running = Gauge("vllm:num_requests_running", "Sequences that are computed", registry=registry)
        self._waiting = Gauge("vllm:num_requests_waiting", "Sequences and media that wait", registry=registry)
        self._kv_usage = Gauge(
            "vllm:kv_cache_usage_perc", "KV blocks in use, of the fullest instance; 1 means all", registry=registry
        )

    def set(self, num_running: int, num_waiting: int, kv_usage: float) -> None:
        self._running.set(num_running)
        self._waiting.set(num_waiting)
        self._kv_usage.set(kv_usage)


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
    return operator.add if family.kind in _CUMULATIVE or family.name in summed else max
