"""Figures of finished requests in the last minutes, for the dashboard: slots of one, five and thirty seconds."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from math import inf
from statistics import quantiles
from typing import Any

from epd_serve.config.sections import SLOConfig
from proxy.observe.record import ENCODE, QUEUE, TRANSFER, RequestRecord

#: The time ranges of the page in seconds, and the width of a slot of each.
RANGES_S = {60: 1, 300: 5, 1800: 30}
NUM_SLOTS = 60
#: Times kept of one second, and used for one percentile.
_MAX_SAMPLES, _MAX_SORTED = 64, 2000


@dataclass(slots=True)
class Slot:
    """Counts of requests that ended in some seconds; ``number`` counts slots of the monotonic clock."""

    number: int
    counts: Counter[str] = field(default_factory=Counter)
    #: Failed and refused requests by status and error code.
    reasons: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    #: Features and KV sent, by (kind, source, target).
    flows: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    stages: Counter[str] = field(default_factory=Counter)
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)

    def merge(self, other: Slot) -> None:
        """Add the counts and times of another slot."""
        for name in ("counts", "reasons", "sources", "flows", "stages"):
            getattr(self, name).update(getattr(other, name))
        self.ttft_s += other.ttft_s
        self.tpot_s += other.tpot_s


class Figures:
    """Slots of finished requests; ``requests`` are the last of them."""

    def __init__(self, slo: SLOConfig) -> None:
        self._limits_ms = slo.ttft_ms or inf, slo.tpot_ms or inf
        self.requests: deque[RequestRecord] = deque(maxlen=30)
        self._slots = {width: deque[Slot](maxlen=NUM_SLOTS + 1) for width in RANGES_S.values()}

    def put(self, record: RequestRecord) -> None:
        """Count a finished request; a second enters the wider slots when the next one begins."""
        assert record.end_s is not None
        self.requests.appendleft(record)
        second, seconds = int(record.end_s), self._slots[1]
        if not seconds or seconds[-1].number != second:
            for width, slots in self._slots.items():
                if width > 1 and seconds:
                    number = seconds[-1].number // width
                    if not slots or slots[-1].number != number:
                        slots.append(Slot(number))
                    slots[-1].merge(seconds[-1])
            seconds.append(Slot(second))
        slot = seconds[-1]
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
            if time_s is None:
                continue
            if len(times) < _MAX_SAMPLES:
                times.append(time_s)
            elif (place := int(random.random() * counts["requests"])) < _MAX_SAMPLES:
                times[place] = time_s
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

    def series(self, width: int, now_s: float) -> dict[str, list[float | None]]:
        """Return rates and medians in ms of the last :data:`NUM_SLOTS` complete slots, oldest first."""
        last, known = int(now_s) // width - 1, {one.number: one for one in self._slots[width]}
        shown = [known.get(number, Slot(number)) for number in range(last - NUM_SLOTS + 1, last + 1)]
        return {
            "requests": [one.counts["requests"] / width for one in shown],
            "failed": [one.counts["failed"] for one in shown],
            "attainment": [_attainment(one) for one in shown],
            "tokens": [one.counts["tokens"] / width for one in shown],
            "ttft_ms": [_percentile(one.ttft_s, 50) for one in shown],
            "tpot_ms": [_percentile(one.tpot_s, 50) for one in shown],
        }

    def window(self, width: int, now_s: float, span_s: int) -> dict[str, Any]:
        """Return rates, percentiles and sums of the last ``span_s`` seconds."""
        total = Slot(0)
        slots = [((one.number + 1) * width, one) for one in self._slots[width]]
        if width > 1:  # the current second is in no wider slot yet
            slots += [(one.number + 1, one) for one in list(self._slots[1])[-1:]]
        for end_s, one in slots:
            if now_s - span_s < end_s:
                total.merge(one)
        return {
            "span_s": span_s,
            "requests_per_s": total.counts["requests"] / span_s,
            "tokens_per_s": total.counts["tokens"] / span_s,
            "num_requests": total.counts["requests"],
            "num_failed": total.counts["failed"],
            "reasons": dict(total.reasons.most_common()),
            "attainment": _attainment(total),
            "ttft_ms": {f"p{percent}": _percentile(total.ttft_s, percent) for percent in (50, 95, 99)},
            "tpot_ms": {f"p{percent}": _percentile(total.tpot_s, percent) for percent in (50, 95, 99)},
            "sources": total.sources,
            "stages_per_s": {name: count / span_s for name, count in total.stages.items()},
            "flows": [
                {"kind": kind, "source": source, "target": target, "per_s": count / span_s}
                for (kind, source, target), count in total.flows.items()
            ],
        }


def _attainment(slot: Slot) -> float | None:
    measured = slot.counts["measured"]
    return slot.counts["met"] / measured if measured else None


def _percentile(values: list[float], percent: int) -> float | None:
    """Return a percentile in milliseconds."""
    if not values:
        return None
    values = values if len(values) <= _MAX_SORTED else random.sample(values, _MAX_SORTED)
    value = values[0] if len(values) == 1 else quantiles(values, n=100, method="inclusive")[percent - 1]
    return round(1e3 * value, 3)
