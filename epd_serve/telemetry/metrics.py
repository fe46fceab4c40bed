"""Counters and histograms for a hot path: plain numbers of one thread, Prometheus's families when asked."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

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
