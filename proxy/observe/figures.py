"""Figures of finished requests in the last minutes, for the dashboard: slots of one, five and thirty seconds."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from statistics import quantiles
from typing import Any

from epd_serve.config.sections import SLOConfig
from proxy.observe.record import ENCODE, QUEUE, TRANSFER, RequestRecord

#: The time ranges of the page in seconds, and the width of a slot of each.
RANGES_S = {60: 1, 300: 5, 1800: 30}
NUM_SLOTS = 60
#: Times kept of one slot: enough for its percentiles.
_MAX_SAMPLES = 256


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


class Figures:
    """Slots of finished requests; ``requests`` are the last of them."""

    def __init__(self, slo: SLOConfig) -> None:
        self._limits_ms = slo.ttft_ms or inf, slo.tpot_ms or inf
        self.requests: deque[RequestRecord] = deque(maxlen=30)
        self._slots = {width: deque[Slot](maxlen=NUM_SLOTS + 1) for width in RANGES_S.values()}

    def put(self, record: RequestRecord) -> None:
        """Count a finished request in one slot of each width."""
        assert record.end_s is not None
        self.requests.appendleft(record)
        failed, measured = record.status >= 500, record.ttft_s is not None
        times_ms = 1e3 * (record.ttft_s or 0.0), 1e3 * (record.tpot_s or 0.0)
        met = not failed and all(ms <= limit for ms, limit in zip(times_ms, self._limits_ms, strict=True))
        flows = list(_flows(record))
        stages = [str(span.attributes["instance"]) for span in record.spans if span.name not in (QUEUE, TRANSFER)]
        sources = [str(span.attributes["feature"]) for span in record.spans if "feature" in span.attributes]
        for width, slots in self._slots.items():
            number = int(record.end_s) // width
            if not slots or slots[-1].number != number:
                slots.append(Slot(number))
            slot = slots[-1]
            counts = slot.counts
            counts["requests"] += 1
            counts["failed"] += failed
            counts["tokens"] += record.output_tokens or 0
            if failed or measured:
                counts["measured"] += 1
                counts["met"] += met
            if record.status != 200:
                slot.reasons[f"{record.status} {record.error}".strip()] += 1
            slot.sources.update(sources)
            slot.flows.update(flows)
            slot.stages.update(stages)
            for times, seconds in ((slot.ttft_s, record.ttft_s), (slot.tpot_s, record.tpot_s)):
                if seconds is None:
                    continue
                if len(times) < _MAX_SAMPLES:
                    times.append(seconds)
                elif (place := int(random.random() * counts["requests"])) < _MAX_SAMPLES:
                    times[place] = seconds

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
        for one in self._slots[width]:
            if now_s - span_s < (one.number + 1) * width:
                for name in ("counts", "reasons", "sources", "flows", "stages"):
                    getattr(total, name).update(getattr(one, name))
                total.ttft_s += one.ttft_s
                total.tpot_s += one.tpot_s
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


def _flows(record: RequestRecord) -> Iterable[tuple[str, str, str]]:
    """Yield what was sent between instances: features from E to P, KV from P to D."""
    prefill = record.prefill or ""
    for span in record.spans:
        if span.name in (ENCODE, TRANSFER) and "failed" not in span.attributes:
            instance = str(span.attributes["instance"])
            if instance != prefill:
                yield ("kv", prefill, instance) if span.name == TRANSFER else ("features", instance, prefill)


def _attainment(slot: Slot) -> float | None:
    measured = slot.counts["measured"]
    return slot.counts["met"] / measured if measured else None


def _percentile(values: list[float], percent: int) -> float | None:
    """Return a percentile in milliseconds."""
    if not values:
        return None
    value = values[0] if len(values) == 1 else quantiles(values, n=100, method="inclusive")[percent - 1]
    return round(1e3 * value, 3)
