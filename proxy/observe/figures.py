"""Dashboard figures of the requests that finished in the last minute, one slot per second."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from statistics import quantiles
from typing import Any

from epd_serve.config.sections import SLOConfig
from proxy.observe.record import ENCODE, QUEUE, TRANSFER, RequestRecord

#: Seconds on the dashboard.
NUM_SLOTS = 60
#: Most latencies kept per second.
_MAX_SAMPLES = 64


@dataclass(slots=True)
class Slot:
    """Counts of the requests that ended in one or more seconds of the monotonic clock.

    ``reasons``: statuses and errors of unsuccessful requests; ``flows``: transfers by (kind, source, target).
    """

    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    flows: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    stages: Counter[str] = field(default_factory=Counter)
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)

    @property
    def attainment(self) -> float | None:
        measured = self.counts["measured"]
        return self.counts["met"] / measured if measured else None

    def merge(self, other: Slot) -> None:
        for name in ("counts", "reasons", "sources", "flows", "stages"):
            getattr(self, name).update(getattr(other, name))
        self.ttft_s += other.ttft_s
        self.tpot_s += other.tpot_s


class Figures:
    """Slots of finished requests; ``requests`` are the latest ones."""

    def __init__(self, slo: SLOConfig) -> None:
        self._limits_ms = slo.ttft_ms or inf, slo.tpot_ms or inf
        self.requests: deque[RequestRecord] = deque(maxlen=30)
        self._slots: deque[tuple[int, Slot]] = deque(maxlen=NUM_SLOTS + 1)

    def put(self, record: RequestRecord) -> None:
        """Count a finished request."""
        assert record.end_s is not None
        self.requests.appendleft(record)
        second = int(record.end_s)
        if not self._slots or self._slots[-1][0] != second:
            self._slots.append((second, Slot()))
        slot = self._slots[-1][1]
        counts, failed = slot.counts, record.status >= 500
        counts["requests"] += 1
        counts["failed"] += failed
        counts["tokens"] += record.output_tokens or 0
        if failed or record.ttft_s is not None:
            times_ms = 1e3 * (record.ttft_s or 0.0), 1e3 * (record.tpot_s or 0.0)
            counts["measured"] += 1
            counts["met"] += not failed and times_ms[0] <= self._limits_ms[0] and times_ms[1] <= self._limits_ms[1]
        if record.status != 200:
            slot.reasons[f"{record.status} {record.error}".strip()] += 1
        for times, time_s in ((slot.ttft_s, record.ttft_s), (slot.tpot_s, record.tpot_s)):
            if time_s is not None and len(times) < _MAX_SAMPLES:
                times.append(time_s)
        prefill = record.prefill or ""
        for span in record.spans:
            if span.name == QUEUE:
                continue
            about, instance = span.attributes, str(span.attributes["instance"])
            if "feature" in about:
                slot.sources[str(about["feature"])] += 1
            if span.name != TRANSFER:
                slot.stages[instance] += 1
            if span.name in (ENCODE, TRANSFER) and instance != prefill and "failed" not in about:
                flow = ("kv", prefill, instance) if span.name == TRANSFER else ("features", instance, prefill)
                slot.flows[flow] += 1

    def series(self, now_s: float) -> dict[str, list[float | None]]:
        """Return counts and medians (ms) of the last NUM_SLOTS complete seconds, oldest first."""
        known, last = dict(self._slots), int(now_s) - 1
        shown = [known.get(second, Slot()) for second in range(last - NUM_SLOTS + 1, last + 1)]
        of: dict[str, Callable[[Slot], float | None]] = {
            "requests": lambda one: one.counts["requests"],
            "failed": lambda one: one.counts["failed"],
            "tokens": lambda one: one.counts["tokens"],
            "attainment": lambda one: one.attainment,
            "ttft_ms": lambda one: _percentile_ms(one.ttft_s, 50),
            "tpot_ms": lambda one: _percentile_ms(one.tpot_s, 50),
        }
        return {name: [value(one) for one in shown] for name, value in of.items()}

    def window(self, now_s: float, span_s: int) -> dict[str, Any]:
        """Return rates, percentiles and sums of the last ``span_s`` seconds, at most NUM_SLOTS."""
        total = Slot()
        for second, slot in self._slots:
            if now_s - span_s < second + 1:
                total.merge(slot)
        return {
            "span_s": span_s,
            "requests_per_s": total.counts["requests"] / span_s,
            "tokens_per_s": total.counts["tokens"] / span_s,
            "num_requests": total.counts["requests"],
            "num_failed": total.counts["failed"],
            "reasons": dict(total.reasons.most_common()),
            "attainment": total.attainment,
            "ttft_ms": {f"p{percent}": _percentile_ms(total.ttft_s, percent) for percent in (50, 95, 99)},
            "tpot_ms": {f"p{percent}": _percentile_ms(total.tpot_s, percent) for percent in (50, 95, 99)},
            "sources": total.sources,
            "stages_per_s": {name: count / span_s for name, count in total.stages.items()},
            "flows": [
                {"kind": kind, "source": source, "target": target, "per_s": count / span_s}
                for (kind, source, target), count in total.flows.items()
            ],
        }


def _percentile_ms(values: list[float], percent: int) -> float | None:
    if not values:
        return None
    value = values[0] if len(values) == 1 else quantiles(values, n=100, method="inclusive")[percent - 1]
    return round(1e3 * value, 3)
