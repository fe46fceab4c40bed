"""Runs over time: each request's stages as bars (Gantt), planned against actual rate, the server's devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import ceil, floor

from epd_serve.bench.report.theme import (
    BAD,
    STAGE_COLORS,
    Figure,
    Trace,
    bars,
    color_of,
    figure,
    scatter,
    titled,
    two_panels,
)
from epd_serve.bench.summary import Measured
from epd_serve.bench.types import Record, StageSpan

_MOST_REQUESTS = 120
_LEAST_SHOWN_S = 5e-4
_DEVICE_FIGURE = "utilisation"
_SECONDS = "seconds since the begin"

Bar = tuple[str, float, float]  # stage, begin, length; seconds


def gantt(run: Measured, name: str) -> Figure:
    """The first requests of a run, one line each, in the order in which they were planned."""
    records = sorted(run.records, key=lambda record: (record.scheduled_s, record.index))[:_MOST_REQUESTS]
    lengths: dict[str, list[tuple[float, float, int]]] = {}
    for row, record in enumerate(records):
        for stage, begin, length in _bars(record):
            if length > _LEAST_SHOWN_S:
                lengths.setdefault(stage, []).append((begin, length, row))
    order = [stage for stage in STAGE_COLORS if stage in lengths] + sorted(lengths.keys() - STAGE_COLORS.keys())
    data = [
        bars(
            stage.replace("_", " "),
            [round(length, 4) for _, length, _ in lengths[stage]],
            [row for _, _, row in lengths[stage]],
            STAGE_COLORS.get(stage, "#888888"),
            f"{stage.replace('_', ' ')}: %{{x:.3f}} s<extra>request %{{y}}</extra>",
            base=[round(begin, 4) for begin, _, _ in lengths[stage]],
            width=0.82,
        )
        for stage in order
    ]
    firsts = [
        (record.first_token_s, row) for row, record in enumerate(records) if record.first_token_s is not None
    ]
    marker = {"symbol": "line-ns-open", "size": 7, "color": "#E0218A", "line": {"width": 2}}
    x, y = [round(at, 4) for at, _ in firsts], [row for _, row in firsts]
    data.append(scatter("first token", x, y, "first token at %{x:.3f} s", mode="markers", marker=marker))
    shown = (
        f"the first {len(records)} of {len(run.records)}"
        if len(records) < len(run.records)
        else f"all {len(records)}"
    )
    return figure(
        data,
        f"Where each request's time went: {name}",
        f"A line is a request ({shown}), from when it was planned to its last token",
        barmode="overlay",
        xaxis=titled(_SECONDS, rangemode="tozero"),
        yaxis=titled("request", autorange="reversed", showgrid=False, zeroline=False),
        height=max(360, 170 + 6 * len(records)),
        legend={"traceorder": "normal"},
    )


def _bars(record: Record) -> Iterator[Bar]:
    sent_s = record.sent_s
    end_s = record.finish_s if record.last_event_s is None else record.last_event_s
    yield "waits at the tester", record.scheduled_s, (end_s if sent_s is None else sent_s) - record.scheduled_s
    if sent_s is None:
        return
    if not record.succeeded:
        yield "failed", sent_s, max(end_s - sent_s, 1e-4)
        return
    if not record.stages:
        first_s = end_s if record.first_token_s is None else record.first_token_s
        yield "until the first token", sent_s, first_s - sent_s
        yield "tokens", first_s, end_s - first_s
        return
    yield "on its way", sent_s, end_s - sent_s
    for stage, begin, length in pieces(record.stages):
        # the gateway's clock begins when the request has arrived, which is soon after the send
        yield stage, sent_s + begin, length


def planned_and_actual(run: Measured, name: str) -> Figure:
    """Requests since the begin, as planned, sent and answered: the gaps between the lines are waiting."""
    planned = sorted(record.scheduled_s for record in run.records)
    sent = sorted(record.sent_s for record in run.records if record.sent_s is not None)
    answered = sorted(record.finish_s for record in run.records if record.succeeded)
    failed = sorted(record.finish_s for record in run.records if not record.succeeded)
    end = max(record.finish_s for record in run.records)
    width = _bin_width(end)
    lines: list[Trace] = []
    for times, text, color, dash in (
        (planned, "planned", "#888888", "dash"),
        (sent, "sent", color_of(0), "solid"),
        (answered, "answered", color_of(2), "solid"),
        (failed, "failed", BAD, "solid"),
    ):
        if not times:
            continue
        counts = [0] * (floor(end / width) + 1)
        for at in times:
            counts[min(floor(max(at, 0.0) / width), len(counts) - 1)] += 1
        line = {"color": color, "dash": dash, "width": 2, "shape": "hv"}
        x, y = [width * n for n in range(len(counts) + 1)], [round(n / width, 3) for n in (*counts, counts[-1])]
        lines.append(scatter(text, x, y, f"{text}: %{{y:.2f}} a second", line=line))
        x, y = [0.0, *(round(at, 3) for at in times)], list(range(len(times) + 1))
        lines.append(scatter(text, x, y, f"{text}: %{{y}}", axes="2", showlegend=False, line=line))
    seconds, rate, count = (
        titled(text, rangemode="tozero") for text in (_SECONDS, "requests a second", "requests until then")
    )
    return two_panels(
        lines,
        f"Planned and actual load: {name}",
        "Left: requests a second. Right: all until then; the further right of the dashes, the longer they waited",
        ((seconds, rate), (seconds, count)),
    )


def device_use(run: Measured, name: str) -> Figure | None:
    """A plot of the utilisation of the server's devices over time; None where no utilisation was read."""
    samples = [sample for sample in run.samples if sample.phase == "during"]
    names = sorted({device for sample in samples for device, of in sample.devices.items() if _DEVICE_FIGURE in of})
    if not names:
        return None
    lines: list[Trace] = []
    for position, device in enumerate(names):
        points = [
            (sample.at_s, 100 * sample.devices[device][_DEVICE_FIGURE])
            for sample in samples
            if _DEVICE_FIGURE in sample.devices.get(device, {})
        ]
        x, y = [round(at, 2) for at, _ in points], [round(value, 1) for _, value in points]
        line, fill = {"color": color_of(position), "width": 2}, "tozeroy" if len(names) == 1 else "none"
        lines.append(scatter(device, x, y, f"{device}: %{{y:.0f}} % at %{{x:.1f}} s", line=line, fill=fill))
    return figure(
        lines,
        f"How busy the devices were: {name}",
        "At 100 % there is nothing left to give",
        xaxis=titled(_SECONDS),
        yaxis=titled("in use, %", range=[0, 104]),
        showlegend=len(names) > 1,
        height=300,
    )


def _bin_width(end: float) -> float:
    """The width in seconds of about forty bins, rounded to a length that is easily read."""
    wanted = max(end, 1.0) / 40
    return next((width for width in (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0) if width >= wanted), ceil(wanted))


def timelines(runs: Sequence[Measured]) -> dict[str, list[Figure]]:
    """The figures of each run, by the run's name."""
    found: dict[str, list[Figure]] = {}
    for run in runs:
        name = f"{run.label}, {run.load_text}"
        figures = [gantt(run, name), planned_and_actual(run, name), device_use(run, name)]
        found[name] = [one for one in figures if one is not None]
    return found


#: Where stages overlap, the time belongs to the first of these: P is called at once and waits for the encoder, KV
#: goes to D while P still computes.
_ORDER = ("queue", "encode", "prefill", "kv_transfer", "decode")


def pieces(spans: Sequence[StageSpan]) -> list[tuple[str, float, float]]:
    """(stage, begin, length) in seconds from the request's arrival; no two of them overlap."""
    cuts = sorted({at for span in spans for at in (span.start_s, span.start_s + span.duration_s)})
    found: list[tuple[str, float, float]] = []
    for begin, end in pairwise(cuts):
        covering = [
            span.stage for span in spans if span.start_s <= begin and end <= span.start_s + span.duration_s
        ]
        if not covering:
            continue
        stage = min(covering, key=_rank)
        if found and found[-1][0] == stage and abs(found[-1][1] + found[-1][2] - begin) < 1e-9:
            found[-1] = (stage, found[-1][1], end - found[-1][1])
        else:
            found.append((stage, begin, end - begin))
    return found


def stage_means(records: Sequence[Record]) -> dict[str, float]:
    """Mean seconds of each stage over the requests whose stages are known."""
    told = [record for record in records if record.stages]
    sums: dict[str, float] = {}
    for record in told:
        for stage, _, length in pieces(record.stages):
            sums[stage] = sums.get(stage, 0.0) + length
    return {stage: total / len(told) for stage, total in sums.items()}


def _rank(stage: str) -> tuple[int, str]:
    return (_ORDER.index(stage) if stage in _ORDER else len(_ORDER), stage)
