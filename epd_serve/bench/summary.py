"""Compute the figures and warnings of a run from its records."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain

from epd_serve.bench.plan import parse_arrivals
from epd_serve.bench.types import ClientLoad, Distribution, Record, RunSettings, Share, Summary, Totals

#: Milliseconds per second.
MS = 1e3
#: Figures of a request, as attributes of :class:`Record`.
_FIGURES = {
    "ttft": "ttft_s",
    "ttft_scheduled": "ttft_scheduled_s",
    "first_chunk": "first_chunk_latency_s",
    "tpot": "tpot_s",
    "e2el": "e2el_s",
    "e2el_scheduled": "e2el_scheduled_s",
    "send_lag": "send_lag_s",
    "input_tokens": "num_prompt_tokens",
    "output_tokens": "num_output_tokens",
    "prefill_token_throughput": "prefill_tokens_per_s",
    "output_token_throughput": "output_tokens_per_s",
}
#: Two-sided 95 % of the normal distribution.
_Z = 1.959963984540054
#: Shares of the planned rate and of a core, and a delay, beyond which the tester distorts a run.
_MIN_RATE_SHARE, _MAX_CPU_SHARE, _MAX_LAG_S = 0.98, 0.9, 0.01


def percentile(ascending: Sequence[float], q: float) -> float:
    """Return a percentile of at least one value, interpolated linearly like numpy's; ``q`` is in 0..100."""
    at = (len(ascending) - 1) * q / 100
    below = math.floor(at)
    above = min(below + 1, len(ascending) - 1)
    return ascending[below] + (ascending[above] - ascending[below]) * (at - below)


def distribution(values: Iterable[float]) -> Distribution | None:
    """Return the distribution of the values; None without values."""
    ascending = sorted(values)
    if not ascending:
        return None
    mean = math.fsum(ascending) / len(ascending)
    variance = math.fsum((value - mean) ** 2 for value in ascending) / len(ascending)
    return Distribution(
        n=len(ascending),
        mean=mean,
        std=math.sqrt(variance),
        min=ascending[0],
        max=ascending[-1],
        median=percentile(ascending, 50),
        **{f"p{q}": percentile(ascending, q) for q in (75, 90, 95, 99)},
    )


def wilson(part: int, whole: int) -> Share:
    """Return a share with its 95 % Wilson score interval, which also holds near 0 and 1 and for few requests."""
    if not whole:
        return Share(part=part, whole=whole, value=0.0, low=0.0, high=1.0)
    p, z2 = part / whole, _Z**2
    middle = p + z2 / (2 * whole)
    half = _Z * math.sqrt(p * (1 - p) / whole + z2 / (4 * whole**2))
    scale = 1 + z2 / whole
    low, high = max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)
    return Share(part=part, whole=whole, value=p, low=low if part else 0.0, high=high if part < whole else 1.0)


def _concurrency(records: Sequence[Record], duration_s: float) -> tuple[float, int]:
    """Return the mean and the largest number of open requests."""
    sent = [record for record in records if record.sent_s is not None]
    changes = sorted([(one.sent_s or 0.0, 1) for one in sent] + [(one.finish_s, -1) for one in sent])
    open_s = math.fsum(one.finish_s - (one.sent_s or 0.0) for one in sent)
    return open_s / duration_s, max(accumulate(change for _, change in changes), default=0)


def attains(record: Record, settings: RunSettings) -> tuple[bool, bool]:
    """Return whether TTFT (from the scheduled time) and TPOT keep their limits; a failed request misses both."""
    if not record.succeeded:
        return False, False
    ttft_s, tpot_s = record.ttft_scheduled_s, record.tpot_s
    return (
        ttft_s is not None and ttft_s * MS <= settings.slo.ttft_ms,
        tpot_s is None or tpot_s * MS <= settings.slo.tpot_ms,
    )


def summarise(settings: RunSettings, records: Sequence[Record], tester: ClientLoad | None = None) -> Summary:
    """Return the figures of a run. Raises ValueError without records."""
    if not records:
        raise ValueError("the run finished no requests")
    total = _summarise_part(settings, records)
    names = sorted({record.modality for record in records})
    parts = {name: [one for one in records if one.modality == name] for name in names if len(names) > 1}
    return Summary(
        total=total,
        by_modality={name: _summarise_part(settings, part) for name, part in parts.items()},
        warnings=list(_warn(settings, records, tester, total)),
    )


def _summarise_part(settings: RunSettings, records: Sequence[Record]) -> Totals:
    begin_s, end_s = min(one.scheduled_s for one in records), max(one.finish_s for one in records)
    duration_s = max(end_s - begin_s, 1e-9)
    succeeded = [record for record in records if record.succeeded]
    kept = [attains(record, settings) for record in records]
    good = [record for record, both in zip(records, kept, strict=True) if all(both)]
    figures = {
        name: distribution(value for one in succeeded if (value := getattr(one, attribute)) is not None)
        for name, attribute in _FIGURES.items()
    }
    figures["itl"] = distribution(chain.from_iterable(record.itl_s for record in succeeded))
    input_tokens = sum(record.num_prompt_tokens or 0 for record in succeeded)
    output_tokens = sum(record.num_output_tokens for record in succeeded)
    ttft_s = sum(record.ttft_s or 0.0 for record in succeeded)
    goodput = len(good) / duration_s
    mean_concurrency, max_concurrency = _concurrency(records, duration_s)
    effective = sum(record.num_output_tokens for record in good) / duration_s
    # answers determine the times of later turns and of a closed loop
    is_planned = len(records) > 1 and not any(record.turn for record in records)
    is_planned = is_planned and parse_arrivals(settings).concurrency is None
    return Totals(
        duration_s=duration_s,
        num_requests=len(records),
        num_succeeded=len(succeeded),
        num_failed=len(records) - len(succeeded),
        failures=dict(Counter(str(record.failure) for record in records if record.failure is not None)),
        figures={name: one for name, one in figures.items() if one is not None},
        attainment=wilson(len(good), len(records)),
        ttft_attainment=wilson(sum(ttft for ttft, _ in kept), len(records)),
        tpot_attainment=wilson(sum(tpot for _, tpot in kept), len(records)),
        request_throughput=len(succeeded) / duration_s,
        input_token_throughput=input_tokens / duration_s,
        output_token_throughput=output_tokens / duration_s,
        total_token_throughput=(input_tokens + output_tokens) / duration_s,
        prefill_token_throughput=input_tokens / ttft_s if ttft_s else 0.0,
        goodput=goodput,
        goodput_per_device=goodput / settings.num_devices,
        effective_throughput=effective,
        effective_throughput_per_device=effective / settings.num_devices,
        achieved_rate=_events_per_s([record.sent_s for record in records if record.sent_s is not None]),
        planned_rate=_events_per_s([record.scheduled_s for record in records]) if is_planned else None,
        mean_concurrency=mean_concurrency,
        max_concurrency=max_concurrency,
        total_input_tokens=input_tokens,
        total_output_tokens=output_tokens,
    )


def _events_per_s(times: Sequence[float]) -> float:
    first, last = min(times, default=0.0), max(times, default=0.0)
    return (len(times) - 1) / (last - first) if last > first else 0.0


def _warn(
    settings: RunSettings, records: Sequence[Record], tester: ClientLoad | None, total: Totals
) -> Iterator[str]:
    if settings.emulated:
        yield (
            f"The devices are {settings.emulated}: queues and host work are real; step and link times come from a "
            "data sheet or a profile, or from the CPU if it is slower."
        )
    if total.planned_rate and total.achieved_rate < _MIN_RATE_SHARE * total.planned_rate:
        yield f"The rate fell short: {total.achieved_rate:.2f} of {total.planned_rate:.2f} requests/s were sent."
    lags = sorted(
        one.send_lag_s - one.slot_wait_s for one in records if one.send_lag_s is not None and not one.turn
    )
    late_s = max(percentile(lags, 99) if lags else 0.0, tester.loop_lag_p99_s if tester else 0.0)
    if late_s > _MAX_LAG_S:
        yield f"The tester lagged by {late_s * MS:.0f} ms (p99); all times may be off by that much."
    if tester is not None and tester.cpu_s > _MAX_CPU_SHARE * tester.wall_s:
        yield f"The tester used {tester.cpu_s / tester.wall_s:.0%} of a core and may be the limit."
    if total.num_requests < settings.num_requests:
        yield f"The run is not complete: {total.num_requests} of {settings.num_requests} requests ended."
    if total.num_failed:
        kinds = ", ".join(f"{number} {name}" for name, number in sorted(total.failures.items()))
        yield f"{total.num_failed} of {total.num_requests} requests failed ({kinds})."
    if waited := sum(record.slot_wait_s > 0.001 for record in records):
        yield (
            f"{waited} requests waited for one of {settings.max_concurrency} client slots; latencies from the "
            "scheduled time include the wait."
        )
    if any(record.succeeded and not record.has_usage for record in records):
        yield "Some answers came without usage: their events are counted as output tokens."
