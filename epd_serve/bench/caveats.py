"""Warnings that a reader of a run's figures needs before believing them."""

from __future__ import annotations

from collections.abc import Sequence

from epd_serve.bench.arrivals import ClosedLoop, Ramp, parse_load
from epd_serve.bench.statistics import least_number, percentile
from epd_serve.bench.types import Record, RunSettings, Segment, Summary
from epd_serve.bench.window import is_growing, load_curve

_LEAST_RATE = 0.98
_MOST_LAG_S = 0.01
_MOST_CPU = 0.9


def caveats(
    settings: RunSettings, records: Sequence[Record], segments: Sequence[Segment], summary: Summary
) -> list[str]:
    """Return the warnings as sentences: first the tester's own faults, then the server's, then weak statistics."""
    return [
        *_tester(settings, records, segments, summary),
        *_server(settings, records, summary),
        *_numbers(settings, records, summary),
    ]


def _tester(
    settings: RunSettings, records: Sequence[Record], segments: Sequence[Segment], summary: Summary
) -> list[str]:
    found = []
    total = summary.total
    if total.planned_rate and total.achieved_rate < _LEAST_RATE * total.planned_rate:
        found.append(
            f"The rate fell short: {total.achieved_rate:.2f} of {total.planned_rate:.2f} requests/s were sent."
        )
    lags = sorted(
        record.send_lag_s - record.slot_wait_s
        for record in records
        if record.send_lag_s is not None and not record.turn
    )
    if lags and (late_s := percentile(lags, 99)) > _MOST_LAG_S:
        found.append(
            f"The tester cannot keep up: 1 % of the requests were sent {late_s * 1e3:.0f} ms late or more, "
            "without having waited for a client slot. Latencies from the scheduled time contain it."
        )
    lag_s = max((segment.loop_lag_p99_s for segment in segments), default=0.0)
    if lag_s > _MOST_LAG_S:
        found.append(
            f"The tester's event loop was late by {lag_s * 1e3:.0f} ms (p99): all its times may be as wrong."
        )
    wall_s, cpu_s = sum(one.wall_s for one in segments), sum(one.cpu_s for one in segments)
    if wall_s and cpu_s > _MOST_CPU * wall_s:
        found.append(f"The tester used {cpu_s / wall_s:.0%} of a core: it, and not the server, may be the limit.")
    if len({record.segment for record in records}) > 1:
        found.append(
            "The run was interrupted and resumed: the server was idle in between, and what was under way was sent "
            "again."
        )
    if total.num_requests < settings.num_requests:
        found.append(f"The run is not complete: {total.num_requests} of {settings.num_requests} requests ended.")
    return found


def _server(settings: RunSettings, records: Sequence[Record], summary: Summary) -> list[str]:
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
    load = parse_load(settings.arrivals, rate=settings.rate, time_scale=settings.time_scale)
    if not isinstance(load, ClosedLoop | Ramp) and total.num_requests >= 30:
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


def _numbers(settings: RunSettings, records: Sequence[Record], summary: Summary) -> list[str]:
    found = []
    number = summary.total.num_succeeded
    shaky = [q for q in (90, 95, 99) if number < least_number(q)]
    if shaky:
        names = ", ".join(f"p{q} (needs {least_number(q)})" for q in shaky)
        found.append(f"{number} answers are too few for {names}.")
    load = parse_load(settings.arrivals, rate=settings.rate, time_scale=settings.time_scale)
    if summary.stable is None and not isinstance(load, Ramp):
        found.append(
            "No window of the run is stable with ten requests or more; only figures of the whole are given."
        )
    return found
