"""Every request of the runs: distributions of TTFT and TPOT, and where each request lies (003 figure 16)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from random import Random
from typing import Any

from epd_serve.bench.report.series import Grid
from epd_serve.bench.report.theme import (
    BAD,
    GOOD,
    Figure,
    Trace,
    color_of,
    figure,
    limit_line,
    log_axis,
    note,
    scatter,
    style,
    titled,
    two_panels,
)
from epd_serve.bench.summary import MS, Measured, attains
from epd_serve.bench.types import Record

#: Requests of one run that a plot shows; of more, evenly spread ones.
_MOST_POINTS = 160
_MOST_STEPS = 120
#: How many times the limit a plot of both latencies shows; what lies further out is drawn at its rim.
_RIM = 3


def ttft_ms(record: Record) -> float | None:
    return None if record.ttft_scheduled_s is None or not record.succeeded else MS * record.ttft_scheduled_s


def tpot_ms(record: Record) -> float | None:
    """Milliseconds per output token; 0 for an answer of one token, None for a failure."""
    if not record.succeeded:
        return None
    return MS * (record.tpot_s or 0.0)


def cumulative(grid: Grid) -> Figure:
    """Share of all requests below a latency, at the load that tells most; failures keep a curve below 100 %."""
    load = grid.telling
    single = len(grid.labels) == 1
    runs = [(n, f"{at:.4g} {grid.unit}", run) for n, (at, run) in enumerate(grid.of(grid.labels[0]))]
    lines: list[Trace] = []
    for position, name, run in runs if single else grid.at(load):
        for value, axis in ((ttft_ms, ""), (tpot_ms, "2")):
            x, y = _steps(run, value)
            hover = f"{name}: %{{y:.0f}} % below %{{x:.4g}} ms"
            line = {**style(position)["line"], "shape": "hv"}
            lines.append(scatter(name, x, y, hover, axes=axis, showlegend=not axis, line=line))
    share = titled("requests, %", range=[0, 103])
    at = "at each load" if single else f"at {load:.4g} {grid.unit}"
    return two_panels(
        lines,
        f"How long requests waited, {at}",
        "Share of all requests that were at least this fast; the further left the better. Dashed: the limit",
        ((log_axis("time to the first token, ms"), share), (log_axis("time per output token, ms"), share)),
        shapes=[
            limit_line(grid.slo.ttft_ms, "", axis="x"),
            limit_line(grid.slo.tpot_ms, "", axis="x", of="2"),
        ],
    )


def strips(grid: Grid, which: str) -> Figure:
    """Figure 16: each request a dot, by load, with each deployment's median as a bar; ``which``: ttft or tpot."""
    value, figure_name = (ttft_ms, "ttft_scheduled") if which == "ttft" else (tpot_ms, "tpot")
    limit = grid.slo.ttft_ms if which == "ttft" else grid.slo.tpot_ms
    name = "time to the first token" if which == "ttft" else "time per output token"
    dots, middles = [], []
    width = 0.84 / len(grid.labels)
    for position, label in enumerate(grid.labels):
        x, y, middle_x, middle_y = [], [], [], []
        for slot, load in enumerate(grid.loads):
            run = grid.runs.get((label, load))
            if run is None:
                continue
            jitter = Random(f"{label}{load}")
            center = slot + (position - (len(grid.labels) - 1) / 2) * width
            values = [found for record in _thinned(run.records) if (found := value(record)) is not None]
            y += [round(one, 2) for one in values]
            x += [round(center + (jitter.random() - 0.5) * 0.62 * width, 3) for _ in values]
            median = run.total.ms(figure_name, "median")
            if median is not None:
                middle_x += [center - 0.45 * width, center + 0.45 * width, None]
                middle_y += [median, median, None]
        marker = {"color": color_of(position), "size": 4, "opacity": 0.55}
        hover = f"{label}: %{{y:.4g}} ms"
        dots.append(scatter(label, x, y, hover, mode="markers", showlegend=False, marker=marker))
        line = {"color": color_of(position), "width": 4}
        middles.append(scatter(label, middle_x, middle_y, "", line=line, hoverinfo="skip"))
    return figure(
        [*dots, *middles],
        f"{which.upper()} of every request",
        "A dot is a request, a bar a deployment's median, the dashed line the limit; lower is better",
        xaxis=titled(
            grid.load_title,
            tickvals=list(range(len(grid.loads))),
            ticktext=grid.load_texts,
            range=[-0.5, len(grid.loads) - 0.5],
            showgrid=False,
        ),
        yaxis=log_axis(f"{name}, ms"),
        shapes=[
            limit_line(limit, f"{limit:g} ms"),
            *(
                {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": n + 0.5, "x1": n + 0.5}
                | {"line": {"color": "#888888", "width": 1, "dash": "dot"}}
                for n in range(len(grid.loads) - 1)
            ),
        ],
    )


def corners(grid: Grid) -> Figure:
    """TTFT against TPOT of each request, one panel a deployment (or a load); the green corner is the SLO."""
    load = grid.telling
    if len(grid.labels) == 1:
        panels = [(f"{at:.4g} {grid.unit}", run) for at, run in grid.of(grid.labels[0])]
        at_text = ""
    else:
        panels = [(label, run) for _, label, run in grid.at(load)]
        at_text = f" at {load:.4g} {grid.unit}"
    columns = min(4, len(panels))
    rows = ceil(len(panels) / columns)
    slo = grid.slo
    top_x, top_y = 1.03 * _RIM * slo.ttft_ms, 1.03 * _RIM * slo.tpot_ms
    data: list[Trace] = []
    layout: dict[str, Any] = {}
    shapes, notes = [], []
    for n, (name, run) in enumerate(panels):
        row, column = divmod(n, columns)
        axis = "" if n == 0 else str(n + 1)
        layout[f"xaxis{axis}"] = _panel_axis(column, columns, top_x, f"y{axis}", 0.03) | (
            titled("TTFT, ms") if row == rows - 1 else {}
        )
        layout[f"yaxis{axis}"] = _panel_axis(rows - 1 - row, rows, top_y, f"x{axis}", 0.25 / rows) | (
            titled("TPOT, ms") if column == 0 else {"showticklabels": False}
        )
        data += _corner_dots(run, axis)
        share = run.total.attainment
        rectangle = {"type": "rect", "x0": 0, "y0": 0, "x1": slo.ttft_ms, "y1": slo.tpot_ms}
        look = {"fillcolor": GOOD, "opacity": 0.14, "line": {"width": 0}, "layer": "below"}
        shapes.append({**rectangle, "xref": f"x{axis}", "yref": f"y{axis}", **look})
        notes.append(
            note(f"<b>{name}</b>: {share.value:.0%} good", 0.5, 1.02, f"x{axis} domain", f"y{axis} domain")
        )
    return figure(
        data,
        f"Where requests miss the limits{at_text}",
        "Dots are requests. Right: late first token; up: slow tokens; green: within both; at the rim: further out",
        showlegend=False,
        shapes=shapes,
        annotations=notes,
        height=190 + 230 * rows,
        margin={"l": 70, "r": 30, "t": 118, "b": 60},
        **layout,
    )


def _corner_dots(run: Measured, axis: str) -> list[Trace]:
    found, slo = [], run.settings.slo
    shown = [record for record in _thinned(run.records) if record.succeeded]
    for wanted, color in ((True, GOOD), (False, BAD)):
        some = [record for record in shown if all(attains(record, run.settings)) == wanted]
        x = [round(min(ttft_ms(record) or 0.0, _RIM * slo.ttft_ms), 1) for record in some]
        y = [round(min(tpot_ms(record) or 0.0, _RIM * slo.tpot_ms), 2) for record in some]
        text = [
            f"request {record.index}: TTFT {ttft_ms(record):.0f} ms, TPOT {tpot_ms(record):.1f} ms"
            for record in some
        ]
        marker = {"color": color, "size": 5, "opacity": 0.6}
        found.append(scatter("", x, y, "%{text}", axes=axis, mode="markers", text=text, marker=marker))
    return found


def _panel_axis(place: int, places: int, top: float, anchor: str, gap: float) -> dict[str, object]:
    size, limit = (1 - gap * (places - 1)) / places, top / (1.03 * _RIM)
    begin = place * (size + gap)
    return {
        "domain": [begin, min(1.0, begin + size)],
        "range": [0, top],
        "anchor": anchor,
        "tickvals": [0, limit, 2 * limit],
    }


def _thinned(records: Sequence[Record]) -> Sequence[Record]:
    step = max(1, ceil(len(records) / _MOST_POINTS))
    return records[::step]


def _steps(run: Measured, value: Callable[[Record], float | None]) -> tuple[list[float], list[float]]:
    values = sorted(found for record in run.records if (found := value(record)) is not None)
    count = len(run.records)
    step = max(1, ceil(len(values) / _MOST_STEPS))
    picked = sorted({*range(0, len(values), step), *([len(values) - 1] if values else [])})
    return [round(max(values[n], 0.01), 3) for n in picked], [round(100 * (n + 1) / count, 2) for n in picked]
