"""Joins the traces of a deployment's processes into one file, and breaks down the time of requests by stage."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

import msgspec
from rich.table import Table

from epd_serve.telemetry.span import (
    DECODE_EXECUTE,
    DECODE_QUEUE,
    ENCODE_EXECUTE,
    ENCODE_QUEUE,
    EP_MIGRATION,
    FEATURE_WAIT,
    GATEWAY_RECEIVE,
    GATEWAY_SERVE,
    PREFILL_EXECUTE,
    PREFILL_QUEUE,
    STAGES,
    Span,
)
from epd_serve.telemetry.trace_file import CLOCK, REQUEST

Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestTimes:
    """The times of one complete request.

    Attributes:
        stages: seconds in each of :data:`STAGES` on its critical path.
        received_s: seconds from arrival at the gateway until it sent the stage calls, if the gateway was traced.
        served_s: seconds from then until the end of the answer at the gateway.
    """

    request_id: str
    start_s: float
    stages: dict[str, float]
    received_s: float | None
    served_s: float | None

    @property
    def total_s(self) -> float:
        return sum(self.stages.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """All events of a directory, in microseconds from the first, and their requests."""

    events: list[Event]
    requests: list[RequestTimes]

    def to_json(self) -> bytes:
        """Return the events in the Trace Event Format."""
        return msgspec.json.encode({"traceEvents": self.events, "displayTimeUnit": "ms"})


def read_traces(directory: Path) -> Trace:
    """Join the trace files of a deployment's processes, killed ones included.

    Raises ValueError if there are none.
    """
    files = [events for path in sorted(directory.glob("*.json")) if (events := _read(path))]
    if not files:
        raise ValueError(f"no traces in {directory}; set 'trace: {directory}' in the deployment file")
    offsets: dict[str, int] = {}
    joined: list[Event] = []
    for pid, events in enumerate(files, start=1):
        clock = next(event["args"] for event in events if event["name"] == CLOCK)
        # processes of one host share a clock and must share an offset, as the wall clock may be adjusted
        offset = offsets.setdefault(clock["host"], clock["wall_offset_us"])
        for event in events:
            event["pid"] = pid  # two hosts may use equal pids
            if "ts" in event:
                event["ts"] += offset
        joined += [event for event in events if event["name"] != CLOCK]
    timed = [event for event in joined if "ts" in event]
    origin = min((event["ts"] for event in timed), default=0)
    for event in timed:
        event["ts"] -= origin
    by_request: dict[str, list[Span]] = {}
    for begin, end in pairwise(event for event in joined if event.get("cat") == REQUEST):
        if (begin["ph"], end["ph"], begin["name"]) == ("b", "e", end["name"]) and begin["id"] == end["id"]:
            request_id = begin["args"]["request"]
            span = Span(begin["name"], request_id, begin["ts"] / 1e6, end["ts"] / 1e6, begin["args"])
            by_request.setdefault(request_id, []).append(span)
    requests = [times for spans in by_request.values() if (times := _request_times(spans)) is not None]
    return Trace(events=joined, requests=sorted(requests, key=lambda request: request.start_s))


def _read(path: Path) -> list[Event]:
    """Return the events of one process, one per line; nothing for other kinds of files."""
    first, *lines = path.read_bytes().splitlines() or [b""]
    events: list[Event] = []
    for line in lines if first.strip() == b"[" else ():
        with suppress(msgspec.DecodeError):  # the closing bracket or a truncated line
            events.append(msgspec.json.decode(line.strip(b","), type=Event))
    return events if any(event.get("name") == CLOCK for event in events) else []


def summary(requests: Sequence[RequestTimes]) -> dict[str, Any]:
    """Return times in milliseconds: each stage, their sum, the gateway before them, calls and answer, total."""
    rows = {stage: [request.stages[stage] for request in requests] for stage in STAGES}
    rows["stages"] = [request.total_s for request in requests]
    times = [(r.received_s, r.served_s) for r in requests if r.received_s is not None and r.served_s is not None]
    if len(times) == len(requests):
        rows["gateway"] = [received for received, _ in times]
        rows["between"] = [served - r.total_s for (_, served), r in zip(times, requests, strict=True)]
        rows["e2e"] = [received + served for received, served in times]
    whole = fmean(rows.get("e2e") or rows["stages"]) if requests else 0.0
    return {
        "num_requests": len(requests),
        "rows": {
            name: {
                "mean_ms": 1e3 * fmean(values),
                "p50_ms": 1e3 * _percentile(values, 50),
                "p95_ms": 1e3 * _percentile(values, 95),
                "share": fmean(values) / whole if whole else 0.0,
            }
            for name, values in rows.items()
            if values
        },
    }


def _percentile(values: list[float], percent: int) -> float:
    return quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else values[0]


def breakdown_table(figures: dict[str, Any]) -> Table:
    """Return the figures of :func:`summary` as a table."""
    labels = {"stages": "all stages", "gateway": "gateway, before", "between": "calls and answer", "e2e": "total"}
    table = Table(title=f"Mean of {figures['num_requests']} requests")
    table.add_column("stage")
    for heading in ("mean ms", "p50 ms", "p95 ms", "share"):
        table.add_column(heading, justify="right")
    for name, row in figures["rows"].items():
        if name in ("stages", "e2e"):
            table.add_section()
        times = [f"{row[key]:.2f}" for key in ("mean_ms", "p50_ms", "p95_ms")]
        table.add_row(labels.get(name, name.replace("_", " ")), *times, f"{row['share']:.1%}")
    return table


def _request_times(spans: list[Span]) -> RequestTimes | None:
    """Return the times of a request's critical path, or None if spans are missing."""
    at = {span.name: span for span in spans if not span.attributes.get("item")}
    if not {PREFILL_QUEUE, PREFILL_EXECUTE, DECODE_EXECUTE} <= at.keys():
        return None
    queue, execute, decode = at[PREFILL_QUEUE], at[PREFILL_EXECUTE], at[DECODE_EXECUTE]
    cuts = [queue.start_s] * 3
    if FEATURE_WAIT in at:
        migrations = [span for span in spans if span.name == EP_MIGRATION]
        last = max(migrations, key=lambda span: span.end_s, default=None)
        if last is None:
            return None
        item = last.attributes["item"]
        of_item = {
            span.name: span for span in spans if span.attributes.get("item") == item and span.end_s <= last.end_s
        }
        if ENCODE_QUEUE not in of_item:
            return None
        encoded = of_item.get(ENCODE_EXECUTE, of_item[ENCODE_QUEUE])
        cuts = [of_item[ENCODE_QUEUE].start_s, of_item[ENCODE_QUEUE].end_s, encoded.end_s]
    handed = at[DECODE_QUEUE].start_s if DECODE_QUEUE in at else execute.end_s
    cuts += [queue.start_s, execute.start_s, execute.end_s, handed, decode.start_s, decode.end_s]
    for index in range(1, len(cuts)):  # hosts' clocks may differ by more than a stage takes
        cuts[index] = max(cuts[index], cuts[index - 1])
    gateway = [
        None if name not in at else at[name].end_s - at[name].start_s for name in (GATEWAY_RECEIVE, GATEWAY_SERVE)
    ]
    return RequestTimes(
        request_id=spans[0].request_id,
        start_s=cuts[0],
        stages={stage: end - start for stage, (start, end) in zip(STAGES, pairwise(cuts), strict=True)},
        received_s=gateway[0],
        served_s=gateway[1],
    )
