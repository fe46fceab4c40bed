"""Figures of what a gateway's clients have got in the last minutes, in slots of one, five and thirty seconds."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from itertools import islice
from math import inf
from statistics import quantiles
from typing import Any

import msgspec

from epd_serve.config.sections import SLOConfig
from proxy.observe.record import ENCODE, QUEUE, TRANSFER, RequestRecord

#: Seconds that can be looked back, and the width of the slots that are shown of them.
RANGES_S = {60: 1, 300: 5, 1800: 30}
NUM_SLOTS = 60
#: Times that are kept of one slot: enough for its percentiles, however many requests end in it.
_MAX_SAMPLES = 256
_NUM_REQUESTS = 120


class Slot(msgspec.Struct):
    """Figures of the requests that ended in some seconds; ``number`` counts slots of the monotonic clock.

    Attributes:
        num_failed: for want of an instance, or by a fault of one.
        num_measured: streamed answers and failed ones. num_met: those of them that kept the SLO.
        reasons: of those that were not answered with 200, by status and code.
    """

    number: int
    num_requests: int = 0
    num_failed: int = 0
    num_measured: int = 0
    num_met: int = 0
    num_tokens: int = 0
    ttft_s: list[float] = msgspec.field(default_factory=list)
    tpot_s: list[float] = msgspec.field(default_factory=list)
    reasons: dict[str, int] = msgspec.field(default_factory=dict)
    sources: dict[str, int] = msgspec.field(default_factory=dict)
    flows: dict[tuple[str, str, str], int] = msgspec.field(default_factory=dict)
    stages: dict[str, int] = msgspec.field(default_factory=dict)

    def add(self, other: Slot) -> None:
        """Put another slot's figures to these; each side keeps times as its requests are many."""
        mine, theirs = self.num_requests, other.num_requests
        for name in ("num_requests", "num_failed", "num_measured", "num_met", "num_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for times, more in ((self.ttft_s, other.ttft_s), (self.tpot_s, other.tpot_s)):
            if len(times) + len(more) > _MAX_SAMPLES:
                share = round(_MAX_SAMPLES * theirs / max(1, mine + theirs))
                share = max(min(share, len(more)), _MAX_SAMPLES - len(times))
                times[:] = random.sample(times, _MAX_SAMPLES - share)
                more = random.sample(more, share)
            times += more
        counts: tuple[tuple[dict[Any, int], dict[Any, int]], ...] = (
            (self.reasons, other.reasons),
            (self.sources, other.sources),
            (self.flows, other.flows),
            (self.stages, other.stages),
        )
        for known, also in counts:
            for key, count in also.items():
                known[key] = known.get(key, 0) + count


class Figures:
    """Takes requests that are over; :attr:`requests` are the last of them.

    A second's figures go into the wider slots when the next one begins.
    """

    def __init__(self, slo: SLOConfig | None = None) -> None:
        slo = slo or SLOConfig()
        self._ttft_ms = inf if slo.ttft_ms is None else slo.ttft_ms
        self._tpot_ms = inf if slo.tpot_ms is None else slo.tpot_ms
        self.requests: deque[RequestRecord] = deque(maxlen=_NUM_REQUESTS)
        self._slots = {width: deque[Slot](maxlen=NUM_SLOTS + 2) for width in RANGES_S.values()}

    def add(self, record: RequestRecord) -> None:
        """A finished request."""
        assert record.end_s is not None
        self.requests.append(record)
        second, seconds = int(record.end_s), self._slots[1]
        if not seconds or seconds[-1].number != second:
            if seconds:
                self._put_into_wider(seconds[-1])
            seconds.append(Slot(second))
        now = seconds[-1]
        now.num_requests += 1
        failed = record.status >= 500
        now.num_failed += failed
        now.num_tokens += record.output_tokens or 0
        if record.status != 200:
            reason = f"{record.status} {record.error}".strip()
            now.reasons[reason] = now.reasons.get(reason, 0) + 1
        ttft_s, tpot_s = record.ttft_s, record.tpot_s
        if failed or ttft_s is not None:
            now.num_measured += 1
            in_time = 1e3 * (ttft_s or 0.0) <= self._ttft_ms and 1e3 * (tpot_s or 0.0) <= self._tpot_ms
            now.num_met += not failed and in_time
        if ttft_s is not None:
            _sample(now.ttft_s, ttft_s, now.num_requests)
        if tpot_s is not None:
            _sample(now.tpot_s, tpot_s, now.num_requests)
        prefill, stages = record.prefill or "", now.stages
        for span in record.spans:
            name = span.name
            if name == QUEUE:
                continue
            about = span.attributes
            instance = str(about["instance"])
            if name == TRANSFER:
                flow = "kv", prefill, instance
            else:
                stages[instance] = stages.get(instance, 0) + 1
                if name != ENCODE:
                    continue
                if source := str(about.get("feature", "")):
                    now.sources[source] = now.sources.get(source, 0) + 1
                flow = "features", instance, prefill
            if instance != prefill and "failed" not in about:
                now.flows[flow] = now.flows.get(flow, 0) + 1

    def _put_into_wider(self, second: Slot) -> None:
        for width, slots in self._slots.items():
            if width == 1:
                continue
            number = second.number // width
            if not slots or slots[-1].number != number:
                slots.append(Slot(number))
            slots[-1].add(second)

    def slots(self) -> dict[int, list[Slot]]:
        """All slots by their width, oldest first; those of the last second, too."""
        slots = {width: list(some) for width, some in self._slots.items()}
        for width, some in slots.items():
            if width > 1 and slots[1]:
                last = slots[1][-1]
                one = Slot(last.number // width)
                if some and some[-1].number == one.number:
                    one.add(some.pop())
                one.add(last)
                some.append(one)
        return slots

    def latest(self, number: int) -> list[RequestRecord]:
        """The last ``number`` requests, newest first."""
        return list(islice(reversed(self.requests), number))


def _sample(times: list[float], seconds: float, number: int) -> None:
    """Keep a time, in place of any other once there are as many as are kept of ``number``."""
    if len(times) < _MAX_SAMPLES:
        times.append(seconds)
    elif (place := int(random.random() * number)) < _MAX_SAMPLES:  # randrange() is ten times the work
        times[place] = seconds


def series(slots: Iterable[Slot], width: int, now_s: float) -> dict[str, list[float | None]]:
    """Rates and times in ms of the last :data:`NUM_SLOTS` whole slots, oldest first; None: there were none."""
    last = int(now_s) // width - 1
    of = {one.number: one for one in slots}
    shown = [of.get(number, Slot(number)) for number in range(last - NUM_SLOTS + 1, last + 1)]
    return {
        "requests": [one.num_requests / width for one in shown],
        "failed": [one.num_failed for one in shown],
        "attainment": [one.num_met / one.num_measured if one.num_measured else None for one in shown],
        "tokens": [one.num_tokens / width for one in shown],
        "ttft_ms": [_percentile(one.ttft_s, 50) for one in shown],
        "tpot_ms": [_percentile(one.tpot_s, 50) for one in shown],
    }


def window(slots: Iterable[Slot], width: int, now_s: float, span_s: int) -> dict[str, Any]:
    """Rates, percentiles and sums of the last ``span_s`` seconds."""
    total = Slot(0)
    ttft_s: list[float] = []
    tpot_s: list[float] = []
    for one in slots:
        if now_s - span_s < (one.number + 1) * width:
            total.add(msgspec.structs.replace(one, ttft_s=[], tpot_s=[]))
            ttft_s += one.ttft_s
            tpot_s += one.tpot_s
    return {
        "span_s": span_s,
        "requests_per_s": total.num_requests / span_s,
        "tokens_per_s": total.num_tokens / span_s,
        "num_requests": total.num_requests,
        "num_failed": total.num_failed,
        "reasons": dict(sorted(total.reasons.items(), key=lambda item: -item[1])),
        "attainment": total.num_met / total.num_measured if total.num_measured else None,
        "ttft_ms": {f"p{percent}": _percentile(ttft_s, percent) for percent in (50, 95, 99)},
        "tpot_ms": {f"p{percent}": _percentile(tpot_s, percent) for percent in (50, 95, 99)},
        "sources": total.sources,
        "stages_per_s": {name: count / span_s for name, count in total.stages.items()},
        "flows": [
            {"kind": kind, "source": source, "target": target, "per_s": count / span_s}
            for (kind, source, target), count in total.flows.items()
        ],
    }


def _percentile(values: list[float], percent: int) -> float | None:
    """In milliseconds."""
    if not values:
        return None
    value = values[0] if len(values) == 1 else quantiles(values, n=100, method="inclusive")[percent - 1]
    return round(1e3 * value, 3)
