"""Counters and histograms for a hot path: plain numbers of one thread, Prometheus's families when asked."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

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
