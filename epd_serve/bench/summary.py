"""The figures of a run with the warnings that they need: a pure function of its records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain

from epd_serve.bench.plan import ClosedLoop, load_of
from epd_serve.bench.statistics import (
    distribution,
    is_growing,
    least_number,
    load_curve,
    mean_concurrency,
    percentile,
    stable_window,
    wilson,
)
from epd_serve.bench.types import ClientLoad, Distribution, Record, RunSettings, Summary, WindowSummary

#: Milliseconds in a second.
MS = 1e3
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
    "prefill_token_throughput": lambda one: (
        one.num_prompt_tokens / one.ttft_s if one.ttft_s and one.num_prompt_tokens is not None else None
    ),
    "output_token_throughput": lambda one: one.num_output_tokens / one.e2el_s if one.e2el_s else None,
}


def summarise(settings: RunSettings, records: Sequence[Record], tester: ClientLoad | None = None) -> Summary:
    """Return the figures of a run. Raises ValueError where there is no record."""
    if not records:
        raise ValueError("the run has no finished request")
    load = load_of(settings)
    window = stable_window(records, load.concurrency if isinstance(load, ClosedLoop) else None)
    modalities = sorted({record.modality for record in records})
    of = {name: [one for one in records if one.modality == name] for name in modalities if len(modalities) > 1}
    summary = Summary(
        total=_of_window(settings, records, "all", None),
        stable=window and _of_window(settings, records, "all", window),
        by_modality={name: _of_window(settings, some, name, None) for name, some in of.items()},
        stable_by_modality={name: _of_window(settings, some, name, window) for name, some in of.items()}
        if window
        else {},
        warnings=[],
    )
    summary.warnings = [
        *_warn_of_tester(settings, records, tester, summary),
        *_warn_of_server(settings, records, summary),
        *_warn_of_numbers(summary),
    ]
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


def _of_window(
    settings: RunSettings, records: Sequence[Record], name: str, window: tuple[float, float] | None
) -> WindowSummary:
    """The figures of a window: latencies of the requests sent in it, and the throughput that ended in it; None
    stands for the whole run.

    A turn that was never sent, because the turn before it failed, counts at its scheduled time.
    """
    finished = [record for record in records if record.succeeded]
    curve = load_curve(records)
    if window is None:
        begin_s = min(record.scheduled_s for record in records)
        end_s = max(record.finish_s for record in records)
        num_finished, output_tokens = len(finished), float(sum(record.num_output_tokens for record in finished))
    else:
        begin_s, end_s = window
        records = [
            record
            for record in records
            if begin_s <= (record.scheduled_s if record.sent_s is None else record.sent_s) < end_s
        ]
        num_finished = sum(begin_s <= record.finish_s < end_s for record in finished)
        output_tokens = 0.0
        for record in finished:
            in_time = sum(begin_s <= at_s < end_s for at_s in record.token_times_s)
            output_tokens += in_time * record.num_output_tokens / len(record.token_times_s)
    duration_s = max(end_s - begin_s, 1e-9)
    succeeded = [record for record in records if record.succeeded]
    kept = [attains(record, settings) for record in records]
    good = [record for record, both in zip(records, kept, strict=True) if all(both)]
    input_tokens = sum(record.num_prompt_tokens or 0 for record in succeeded)
    input_rate = num_finished / len(succeeded) * input_tokens / duration_s if succeeded else 0.0
    ttft_s = sum(record.ttft_s or 0.0 for record in succeeded)
    goodput = len(good) / duration_s
    effective = sum(record.num_output_tokens for record in good) / duration_s
    # of a later turn, and in a closed loop, answers decide the time
    is_planned = len(records) > 1 and not any(record.turn for record in records)
    is_planned = is_planned and not isinstance(load_of(settings), ClosedLoop)
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
        achieved_rate=_rate([record.sent_s for record in records if record.sent_s is not None]),
        planned_rate=_rate([record.scheduled_s for record in records]) if is_planned else None,
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


_LEAST_RATE = 0.98
_MOST_LAG_S = 0.01
_MOST_CPU = 0.9


def _warn_of_tester(
    settings: RunSettings, records: Sequence[Record], tester: ClientLoad | None, summary: Summary
) -> list[str]:
    found = []
    total = summary.total
    if settings.emulated:
        found.append(
            f"The devices are {settings.emulated}: queues and the host's work are real, the times of steps and "
            "links are those of a data sheet or a profile, or of the CPU where that is slower."
        )
    if total.planned_rate and total.achieved_rate < _LEAST_RATE * total.planned_rate:
        found.append(
            f"The rate fell short: {total.achieved_rate:.2f} of {total.planned_rate:.2f} requests/s were sent."
        )
    lags = sorted(
        one.send_lag_s - one.slot_wait_s for one in records if one.send_lag_s is not None and not one.turn
    )
    if lags and (late_s := percentile(lags, 99)) > _MOST_LAG_S:
        found.append(
            f"The tester cannot keep up: 1 % of the requests were sent {late_s * 1e3:.0f} ms late or more, "
            "without having waited for a client slot. Latencies from the scheduled time contain it."
        )
    if tester is not None and tester.loop_lag_p99_s > _MOST_LAG_S:
        found.append(
            f"The tester's event loop was late by {tester.loop_lag_p99_s * 1e3:.0f} ms (p99): all times "
            "may be as wrong."
        )
    if tester is not None and tester.cpu_s > _MOST_CPU * tester.wall_s:
        share = tester.cpu_s / tester.wall_s
        found.append(f"The tester used {share:.0%} of a core: it, and not the server, may be the limit.")
    if total.num_requests < settings.num_requests:
        found.append(f"The run is not complete: {total.num_requests} of {settings.num_requests} requests ended.")
    return found


def _warn_of_server(settings: RunSettings, records: Sequence[Record], summary: Summary) -> list[str]:
    found = []
    total = summary.total
    if total.num_failed:
        kinds = ", ".join(f"{number} {name}" for name, number in sorted(total.failures.items()))
        found.append(f"{total.num_failed} of {total.num_requests} requests failed ({kinds}).")
    waited = sum(record.slot_wait_s > 0.001 for record in records)
    if waited:
        found.append(
            f"{waited} requests waited for one of {settings.max_concurrency} client slots: that time is in the "
            "latencies from the scheduled time, not in those from the send."
        )
    if not isinstance(load_of(settings), ClosedLoop) and total.num_requests >= 30:
        times = [record.sent_s for record in records if record.sent_s is not None]
        if times and is_growing(load_curve(records), min(times), max(times)):
            found.append(
                "The requests on their way became more and more: the server does not keep up with this rate, and "
                "latencies depend on how long the run was."
            )
    if any(record.succeeded and not record.has_usage for record in records):
        found.append(
            "The server gave no usage for some answers: their output tokens are counted events, their input "
            "tokens are missing."
        )
    return found


def _warn_of_numbers(summary: Summary) -> list[str]:
    found = []
    number = summary.total.num_succeeded
    if shaky := [q for q in (90, 95, 99) if number < least_number(q)]:
        names = ", ".join(f"p{q} (needs {least_number(q)})" for q in shaky)
        found.append(f"{number} answers are too few for {names}.")
    if summary.stable is None:
        found.append("No window of the run is stable with ten requests or more; the figures are of the whole run.")
    return found
