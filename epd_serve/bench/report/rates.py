"""Plots over the load: attainment, throughput, latency (003 figures 8 to 15), and what each deployment carries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from epd_serve.bench.report.series import Grid
from epd_serve.bench.report.theme import (
    GOOD,
    Figure,
    Trace,
    bars,
    color_of,
    figure,
    limit_line,
    log_axis,
    scatter,
    style,
    titled,
    two_panels,
)
from epd_serve.bench.types import Share, WindowSummary


def capacity(grid: Grid) -> Figure:
    """Goodput of each deployment, the best on top."""
    order = sorted(enumerate(grid.labels), key=lambda one: (grid.goodput(one[1]), -one[0]))
    values = [grid.goodput(label) for _, label in order]
    highest = grid.loads[-1]
    texts = [
        f" at least {value:.3g}"
        if value >= highest
        else f" {value:.3g}"
        if value
        else " less than all that were tried"
        for value in values
    ]
    names, colors = [label for _, label in order], [color_of(position) for position, _ in order]
    hover = "%{y}: %{x:.3g} " + grid.unit + "<extra></extra>"
    bar = bars("", values, names, colors, hover, text=texts, textposition="outside", cliponaxis=False)
    return figure(
        [bar],
        "How much each deployment carries",
        f"Highest load with {grid.share:.0%} of requests within {grid.slo_text}; longer is better",
        is_narrow=True,
        xaxis=titled(grid.load_title, range=[0, 1.18 * highest]),
        yaxis={"type": "category"},
        height=150 + 34 * len(order),
    )


def attainment_map(grid: Grid) -> Figure:
    """Deployments by loads, the share of good requests as colour and number."""
    labels = sorted(grid.labels, key=lambda label: (grid.goodput(label), -grid.labels.index(label)))
    shares = [[grid.good_percent(label, load) for load in grid.loads] for label in labels]
    edge = min(grid.share, 0.999)
    cells: Trace = {
        "type": "heatmap",
        "x": grid.load_texts,
        "y": labels,
        "z": shares,
        "text": [["" if share is None else f"{share:.0f} %" for share in row] for row in shares],
        "texttemplate": "%{text}",
        "zmin": 0,
        "zmax": 100,
        "colorscale": [
            *([0, "#B2182B"], [edge / 2, "#F4A582"], [edge - 1e-4, "#F7F0D0"], [edge, "#B7E2B1"], [1, "#1B9E4B"]),
        ],
        "xgap": 3,
        "ygap": 3,
        "colorbar": {"title": {"text": "good, %"}, "tickvals": sorted({0, 50, round(100 * grid.share), 100})},
        "hovertemplate": "%{y} at %{x}: %{z:.1f} %<extra></extra>",
    }
    return figure(
        [cells],
        "Who keeps its promise at which load",
        f"Share of requests within {grid.slo_text}; green from {grid.share:.0%} on",
        is_narrow=True,
        xaxis=titled(grid.load_title, type="category"),
        yaxis={"type": "category"},
        height=170 + 34 * len(labels),
    )


def attainment(grid: Grid) -> Figure:
    """Figures 8 and 12, with the Wilson interval."""
    if len(grid.loads) == 1:
        return _attainment_bars(grid)
    lines = []
    for position, label in enumerate(grid.labels):
        errors = _errors([run.total.attainment for _, run in grid.of(label)])
        line = _line(grid, label, position, lambda of: 100 * of.attainment.value, "%{y:.1f} %")
        lines.append({**line, "error_y": {**errors, "thickness": 1, "width": 3}})
    return figure(
        lines,
        "SLO attainment",
        f"Share of requests within {grid.slo_text}; failures count as missed; higher is better",
        is_narrow=True,
        xaxis=grid.axis,
        yaxis=titled("good requests, %", range=[-3, 106]),
        shapes=[limit_line(100 * grid.share, f"{grid.share:.0%}")],
        height=_with_legend(len(lines) + 1),
    )


def _errors(shares: Sequence[Share]) -> dict[str, Any]:
    """The intervals of shares in per cent, as error bars."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [100 * (share.high - share.value) for share in shares],
        "arrayminus": [100 * (share.value - share.low) for share in shares],
    }


def _attainment_bars(grid: Grid) -> Figure:
    runs = grid.at(grid.loads[0])
    shares = [run.total.attainment for _, _, run in runs]
    bar: Trace = {
        "type": "bar",
        "x": [label for _, label, _ in runs],
        "y": [100 * share.value for share in shares],
        "error_y": _errors(shares),
        "marker": {"color": [color_of(position) for position, _, _ in runs]},
        "text": [f"{share.part} of {share.whole}" for share in shares],
        "textposition": "inside",
        "insidetextanchor": "start",
        "width": 0.5,
    }
    return figure(
        [bar],
        f"SLO attainment at {grid.load_texts[0]} {grid.unit}",
        f"Share of requests within {grid.slo_text}, with its 95 % interval; failures count as missed",
        is_narrow=True,
        xaxis={"type": "category"},
        yaxis=titled("good requests, %", range=[0, 106]),
        shapes=[limit_line(100 * grid.share, f"{grid.share:.0%}")],
    )


def throughput(grid: Grid) -> Figure:
    """Figures 9 and 13: all output tokens, and those of requests that met the SLO, per device."""
    lines = []
    for position, label in enumerate(grid.labels):
        lines.append(_line(grid, label, position, lambda of: of.output_token_throughput, "%{y:.0f} tokens/s"))
        effective = _line(
            grid, label, position, lambda of: of.effective_throughput_per_device, "%{y:.0f} tokens/s"
        )
        lines.append({**effective, "xaxis": "x2", "yaxis": "y2", "showlegend": False})
    names = "output tokens a second", "effective tokens a second, per device"
    left, right = ((grid.axis, titled(name, rangemode="tozero")) for name in names)
    subtitle = "Left: all output tokens. Right: only those of requests that met the SLO. Higher is better"
    return two_panels(lines, "Throughput", subtitle, (left, right))


def latency(grid: Grid) -> Figure:
    """Figures 10, 11, 14 and 15: medians as lines, the 99th percentile as thin dots."""
    lines = []
    for position, label in enumerate(grid.labels):
        for name, axis in (("ttft_scheduled", ""), ("tpot", "2")):
            of_axis = {"xaxis": f"x{axis}", "yaxis": f"y{axis}"}
            middle, p99 = (partial(WindowSummary.ms, name=name, statistic=one) for one in ("median", "p99"))
            median = _line(grid, label, position, middle, "median %{y:.4g} ms")
            tail = _line(grid, label, position, p99, "99th percentile %{y:.4g} ms")
            tail["line"] = {**tail["line"], "width": 1, "dash": "dot"}
            tail["marker"] = {**tail["marker"], "size": 4}
            lines.append({**median, **of_axis, "showlegend": not axis})
            lines.append({**tail, **of_axis, "showlegend": False, "opacity": 0.6})
    names = "time to the first token, ms", "time per output token, ms"
    left, right = ((grid.axis, log_axis(name)) for name in names)
    return two_panels(
        lines,
        "Latency",
        "Thick: median. Thin dots: 99th percentile. Dashed: the limit. Lower is better",
        (left, right),
        shapes=[
            limit_line(grid.slo.ttft_ms, f"{grid.slo.ttft_ms:g} ms"),
            limit_line(grid.slo.tpot_ms, f"{grid.slo.tpot_ms:g} ms", of="2"),
        ],
    )


def keeps_up(grid: Grid) -> Figure:
    """Planned, sent and answered requests a second: where the server or the tester fell behind."""
    loads, line = list(grid.loads), {"color": GOOD, "width": 6}
    lines = [scatter("as planned", loads, loads, "as planned", line=line, opacity=0.35)]
    for position, label in enumerate(grid.labels):
        lines.append(_line(grid, label, position, _answered(grid, label), "%{y:.2f} answered/s"))
    return figure(
        lines,
        "Who keeps up",
        "Requests answered a second, until the last answer; on the broad line all that came was answered at once",
        is_narrow=True,
        xaxis=grid.axis,
        yaxis=titled(f"answered, {grid.unit}", rangemode="tozero"),
        height=_with_legend(len(lines)),
    )


def _with_legend(num_lines: int) -> int:
    """A height in pixels in which the whole legend shows; equal for figures side by side."""
    return max(440, 250 + 24 * num_lines)


def _answered(grid: Grid, label: str) -> Callable[[WindowSummary], float]:
    devices = grid.of(label)[0][1].settings.num_devices if grid.per_device else 1
    return lambda of: of.request_throughput / devices


def _line(
    grid: Grid, label: str, position: int, value: Callable[[WindowSummary], float | None], hover: str
) -> Trace:
    points = grid.of(label)
    x, y = [load for load, _ in points], [value(run.total) for _, run in points]
    return scatter(label, x, y, f"{label} at %{{x:.4g}}: {hover}", mode="lines+markers", **style(position))
