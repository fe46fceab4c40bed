"""Figures of what a gateway's clients have got in the last two minutes, second by second."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from statistics import quantiles
from typing import Any

import msgspec

from proxy.observe.record import ENCODE, QUEUE, TRANSFER, RequestRecord

SPAN_S = 120
#: Times that are kept of one second: enough for its percentiles, however many requests end in it.
_MAX_SAMPLES = 128
_NUM_REQUESTS = 120


class Second(msgspec.Struct):
    """Figures of the requests that ended in a second; ``second`` is one of the monotonic clock."""

    second: int
    num_requests: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    ttft_s: list[float] = msgspec.field(default_factory=list)
    tpot_s: list[float] = msgspec.field(default_factory=list)
    sources: dict[str, int] = msgspec.field(default_factory=dict)
    flows: dict[tuple[str, str, str], int] = msgspec.field(default_factory=dict)
    stages: dict[str, int] = msgspec.field(default_factory=dict)


class Figures:
    """Takes requests that are over; :attr:`requests` are the last of them.

    Attributes:
        seconds: those in which any ended, oldest first.
    """

    def __init__(self) -> None:
        self.requests: deque[RequestRecord] = deque(maxlen=_NUM_REQUESTS)
        self.seconds: deque[Second] = deque(maxlen=SPAN_S + 2)

    def add(self, record: RequestRecord) -> None:
        """A finished request."""
        assert record.end_s is not None
        self.requests.append(record)
        second = int(record.end_s)
        if not self.seconds or self.seconds[-1].second != second:
            self.seconds.append(Second(second))
        now = self.seconds[-1]
        now.num_requests += 1
        now.num_failed += record.status >= 500
        now.num_tokens += record.output_tokens or 0
        ttft_s, tpot_s = record.ttft_s, record.tpot_s
        if ttft_s is not None and len(now.ttft_s) < _MAX_SAMPLES:
            now.ttft_s.append(ttft_s)
        if tpot_s is not None and len(now.tpot_s) < _MAX_SAMPLES:
            now.tpot_s.append(tpot_s)
        prefill = record.prefill or ""
        for span in record.spans:
            name, about = span.name, span.attributes
            if name == QUEUE:
                continue
            instance = str(about["instance"])
            now.stages[instance] = now.stages.get(instance, 0) + (name != TRANSFER)
            if name == ENCODE:
                if source := str(about.get("feature", "")):
                    now.sources[source] = now.sources.get(source, 0) + 1
                flow = ("features", instance, prefill)
            elif name == TRANSFER:
                flow = ("kv", prefill, instance)
            else:
                continue
            if instance != prefill and "failed" not in about:
                now.flows[flow] = now.flows.get(flow, 0) + 1

    def with_others(self, others: Iterable[Iterable[Second]]) -> Figures:
        """These and those of other processes of this machine together; of the requests only these."""
        together: dict[int, Second] = {}
        for part in (self.seconds, *others):
            for one in part:
                sum_ = together.setdefault(one.second, Second(one.second))
                sum_.num_requests += one.num_requests
                sum_.num_failed += one.num_failed
                sum_.num_tokens += one.num_tokens
                sum_.ttft_s += one.ttft_s
                sum_.tpot_s += one.tpot_s
                for mine, theirs in ((sum_.sources, one.sources), (sum_.stages, one.stages)):
                    for name, count in theirs.items():
                        mine[name] = mine.get(name, 0) + count
                for flow, count in one.flows.items():
                    sum_.flows[flow] = sum_.flows.get(flow, 0) + count
        figures = Figures()
        figures.requests = self.requests
        figures.seconds.extend(together[second] for second in sorted(together))
        return figures

    def latest(self, number: int) -> list[RequestRecord]:
        """The last ``number`` requests, newest first."""
        return list(islice(reversed(self.requests), number))

    def series(self, now_s: float) -> dict[str, list[float | None]]:
        """Return figures of the last :data:`SPAN_S` whole seconds, oldest first; times in ms, None without any."""
        last = int(now_s) - 1
        of = {second.second: second for second in self.seconds}
        seconds = [of.get(number, Second(number)) for number in range(last - SPAN_S + 1, last + 1)]
        return {
            "requests": [second.num_requests for second in seconds],
            "failed": [second.num_failed for second in seconds],
            "tokens": [second.num_tokens for second in seconds],
            "ttft_ms": [_percentile(second.ttft_s, 50) for second in seconds],
            "tpot_ms": [_percentile(second.tpot_s, 50) for second in seconds],
        }

    def window(self, now_s: float, span_s: int = 60) -> dict[str, Any]:
        """Rates, percentiles and sums of the last ``span_s`` seconds."""
        seconds = [second for second in self.seconds if now_s - span_s <= second.second]
        ttft_s = [value for second in seconds for value in second.ttft_s]
        tpot_s = [value for second in seconds for value in second.tpot_s]
        flows: dict[tuple[str, str, str], int] = {}
        sources: dict[str, int] = {}
        stages: dict[str, int] = {}
        for second in seconds:
            for flow, count in second.flows.items():
                flows[flow] = flows.get(flow, 0) + count
            for name, count in second.sources.items():
                sources[name] = sources.get(name, 0) + count
            for name, count in second.stages.items():
                stages[name] = stages.get(name, 0) + count
        return {
            "span_s": span_s,
            "requests_per_s": sum(second.num_requests for second in seconds) / span_s,
            "tokens_per_s": sum(second.num_tokens for second in seconds) / span_s,
            "num_requests": sum(second.num_requests for second in seconds),
            "num_failed": sum(second.num_failed for second in seconds),
            "ttft_ms": {"p50": _percentile(ttft_s, 50), "p95": _percentile(ttft_s, 95)},
            "tpot_ms": {"p50": _percentile(tpot_s, 50), "p95": _percentile(tpot_s, 95)},
            "sources": sources,
            "stages_per_s": {name: count / span_s for name, count in stages.items()},
            "flows": [
                {"kind": kind, "source": source, "target": target, "per_s": count / span_s}
                for (kind, source, target), count in flows.items()
            ],
        }


def _percentile(values: list[float], percent: int) -> float | None:
    """In milliseconds."""
    if not values:
        return None
    value = values[0] if len(values) == 1 else quantiles(values, n=100, method="inclusive")[percent - 1]
    return round(1e3 * value, 3)
