"""The figures of a run, computed from its records: a pure function, so that a run can be read again and again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from epd_serve.bench.arrivals import ClosedLoop, Ramp, parse_load
from epd_serve.bench.caveats import caveats
from epd_serve.bench.statistics import distribution, wilson
from epd_serve.bench.types import Distribution, Record, RunSettings, Segment, Summary, WindowSummary
from epd_serve.bench.window import load_curve, mean_concurrency, stable_window

#: Figures of one request, seconds if not said otherwise; those that a request lacks are left out.
FIGURES: dict[str, Callable[[Record], float | None]] = {
    "ttft": lambda one: one.ttft_s,
    "ttft_scheduled": lambda one: one.ttft_scheduled_s,
    "first_chunk": lambda one: one.first_chunk_latency_s,
    "tpot": lambda one: one.tpot_s,
    "e2el": lambda one: one.e2el_s,
    "e2el_scheduled": lambda one: one.e2el_scheduled_s,
    "send_lag": lambda one: one.send_lag_s,
    "input_tokens": lambda one: one.num_prompt_tokens,
    "output_tokens": lambda one: one.num_output_tokens,
    "output_token_throughput": lambda one: one.num_output_tokens / one.e2el_s if one.e2el_s else None,
}


def summarise(
    settings: RunSettings,
    records: Sequence[Record],
    schedule: Mapping[int, float | None],
    segments: Sequence[Segment] = (),
) -> Summary:
    """The figures of a run.

    Args:
        schedule: planned time of each request by index; None where answers decide.
        segments: for the tester's own figures.

    Raises ValueError where there is no record.
    """
    if not records:
        raise ValueError("the run has no finished request")
    window = None
    load = parse_load(settings.arrivals, rate=settings.rate, time_scale=settings.time_scale)
    if not isinstance(load, Ramp):  # whose rate never stands still
        window = stable_window(records, load.concurrency if isinstance(load, ClosedLoop) else None)
    modalities = sorted({record.modality for record in records})
    apart = modalities if len(modalities) > 1 else []
    of = {name: [record for record in records if record.modality == name] for name in apart}
    total = _whole(settings, records, schedule, "all")
    summary = Summary(
        total=total,
        stable=None if window is None else _within(settings, records, schedule, "all", window),
        by_modality={name: _whole(settings, some, schedule, name) for name, some in of.items()},
        stable_by_modality={}
        if window is None
        else {name: _within(settings, some, schedule, name, window) for name, some in of.items()},
        warnings=[],
    )
    summary.warnings = caveats(settings, records, segments, summary)
    return summary


def attains(record: Record, settings: RunSettings) -> tuple[bool, bool]:
    """Whether TTFT (from the scheduled time) and TPOT keep their limits; a failure keeps neither."""
    if not record.succeeded:
        return False, False
    ttft_s, tpot_s = record.ttft_scheduled_s, record.tpot_s
    return (
        ttft_s is not None and ttft_s * 1e3 <= settings.slo.ttft_ms,
        tpot_s is None or tpot_s * 1e3 <= settings.slo.tpot_ms,
    )


def _whole(
    settings: RunSettings, records: Sequence[Record], schedule: Mapping[int, float | None], name: str
) -> WindowSummary:
    begin_s = min(record.scheduled_s for record in records)
    end_s = max(record.finish_s for record in records)
    finished = [record for record in records if record.succeeded]
    tokens = sum(record.num_output_tokens for record in finished)
    curve = load_curve(records)
    return _summary(settings, records, curve, schedule, name, (begin_s, end_s), len(finished), tokens)


def _within(
    settings: RunSettings,
    records: Sequence[Record],
    schedule: Mapping[int, float | None],
    name: str,
    window: tuple[float, float],
) -> WindowSummary:
    """The figures of a window: latencies of the requests sent in it, and the throughput that ended in it.

    A request that was never sent, as a turn before it had failed, counts at its scheduled time.
    """
    begin_s, end_s = window
    ours = [
        record
        for record in records
        if begin_s <= (record.scheduled_s if record.sent_s is None else record.sent_s) < end_s
    ]
    finished = [record for record in records if record.succeeded]
    num_finished = sum(begin_s <= record.finish_s < end_s for record in finished)
    tokens = 0.0
    for record in finished:
        in_time = sum(begin_s <= at_s < end_s for at_s in record.token_times_s)
        tokens += in_time * record.num_output_tokens / len(record.token_times_s)
    return _summary(settings, ours, load_curve(records), schedule, name, window, num_finished, tokens)


def _summary(
    settings: RunSettings,
    records: Sequence[Record],
    curve: Sequence[tuple[float, int]],
    schedule: Mapping[int, float | None],
    name: str,
    window: tuple[float, float],
    num_finished: int,
    output_tokens: float,
) -> WindowSummary:
    begin_s, end_s = window
    duration_s = max(end_s - begin_s, 1e-9)
    succeeded = [record for record in records if record.succeeded]
    kept = [attains(record, settings) for record in records]
    good = [record for record, both in zip(records, kept, strict=True) if all(both)]
    input_tokens = sum(record.num_prompt_tokens or 0 for record in succeeded)
    input_rate = num_finished / len(succeeded) * input_tokens / duration_s if succeeded else 0.0
    ttft_s = sum(record.ttft_s or 0.0 for record in succeeded)
    goodput = len(good) / duration_s
    effective = sum(record.num_output_tokens for record in good) / duration_s
    times = [record.sent_s for record in records if record.sent_s is not None]
    planned = [at_s for record in records if (at_s := schedule.get(record.index)) is not None]
    devices = settings.num_devices
    return WindowSummary(
        modality=name,
        begin_s=begin_s,
        end_s=end_s,
        duration_s=duration_s,
        num_requests=len(records),
        num_succeeded=len(succeeded),
        num_failed=len(records) - len(succeeded),
        failures=dict(Counter(str(record.failure) for record in records if record.failure is not None)),
        figures=_figures(succeeded),
        attainment=wilson(len(good), len(records)),
        ttft_attainment=wilson(sum(ttft for ttft, _ in kept), len(records)),
        tpot_attainment=wilson(sum(tpot for _, tpot in kept), len(records)),
        request_throughput=num_finished / duration_s,
        input_token_throughput=input_rate,
        output_token_throughput=output_tokens / duration_s,
        total_token_throughput=input_rate + output_tokens / duration_s,
        prefill_token_throughput=input_tokens / ttft_s if ttft_s else 0.0,
        goodput=goodput,
        goodput_per_device=goodput / devices,
        effective_throughput=effective,
        effective_throughput_per_device=effective / devices,
        output_token_throughput_per_device=output_tokens / duration_s / devices,
        achieved_rate=_rate(times),
        planned_rate=_rate(planned) if len(planned) == len(records) and len(planned) > 1 else None,
        mean_concurrency=mean_concurrency(curve, begin_s, end_s),
        max_concurrency=max((number for at_s, number in curve if begin_s <= at_s < end_s), default=0),
        total_input_tokens=input_tokens,
        total_output_tokens=sum(record.num_output_tokens for record in succeeded),
        stages=_stages(succeeded),
    )


def _figures(records: Sequence[Record]) -> dict[str, Distribution]:
    found = {}
    for name, figure in FIGURES.items():
        one = distribution(value for record in records if (value := figure(record)) is not None)
        if one is not None:
            found[name] = one
    gaps = distribution(chain.from_iterable(record.itl_s for record in records))
    return found if gaps is None else {**found, "itl": gaps}


def _stages(records: Sequence[Record]) -> dict[str, Distribution]:
    """Seconds of each stage; several encodes of a request run side by side, so the longest counts."""
    longest: dict[str, list[float]] = {}
    for record in records:
        of_request: dict[str, float] = {}
        for span in record.stages:
            of_request[span.stage] = max(of_request.get(span.stage, 0.0), span.duration_s)
        for name, seconds in of_request.items():
            longest.setdefault(name, []).append(seconds)
    return {name: one for name, values in longest.items() if (one := distribution(values)) is not None}


def _rate(times: Sequence[float]) -> float:
    """Events a second, between the first and the last."""
    first, last = min(times, default=0.0), max(times, default=0.0)
    return (len(times) - 1) / (last - first) if last > first else 0.0
