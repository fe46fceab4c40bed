"""Deployments side by side at one load: what each is good at (003 figure 17), and where its time goes."""

from __future__ import annotations

from math import ceil
from typing import Any

from epd_serve.bench.report.series import Grid
from epd_serve.bench.report.theme import STAGE_COLORS, Figure, Trace, bars, color_of, figure, note, scatter, titled
from epd_serve.bench.report.timeline import stage_means
from epd_serve.bench.summary import MS
from epd_serve.bench.types import WindowSummary

#: What :func:`_strengths` gives.
_AXES = (
    "fast first token",
    "fast tokens",
    "short tail",
    "throughput",
    "in limits",
    "effective<br>per device",
)


def radar(grid: Grid) -> Figure:
    """One small radar a deployment: each axis is the share of the best deployment's figure that it reaches."""
    load = grid.telling
    runs = grid.at(load)
    rows_of = {label: _strengths(run.total) for _, label, run in runs}
    best = [max(row[axis] for row in rows_of.values()) for axis in range(len(_AXES))]
    columns = 2 if len(runs) == 4 else min(3, len(runs))  # else their words meet on a narrow page
    rows = ceil(len(runs) / columns)
    data: list[Trace] = []
    layout: dict[str, Any] = {}
    notes = []
    for n, (position, label, _) in enumerate(runs):
        row, column = divmod(n, columns)
        polar = f"polar{'' if n == 0 else n + 1}"
        left, width = column / columns, 1 / columns
        top, height = 1 - row / rows, 1 / rows
        layout[polar] = {
            "domain": {
                "x": [left + 0.26 * width, left + 0.74 * width],
                "y": [top - 0.86 * height, top - 0.2 * height],
            },
            "radialaxis": {"range": [0, 100], "tickvals": [50, 100], "showticklabels": False},
            "angularaxis": {"tickfont": {"size": 10}, "direction": "clockwise", "rotation": 90},
        }
        shares = [
            100 * value / top_value if top_value else 0.0
            for value, top_value in zip(rows_of[label], best, strict=True)
        ]
        data.append(
            {
                "type": "scatterpolar",
                "subplot": polar,
                "theta": [*_AXES, _AXES[0]],
                "r": [round(share, 1) for share in (*shares, shares[0])],
                "fill": "toself",
                "name": label,
                "line": {"color": color_of(position), "width": 2},
                "hovertemplate": f"{label}: %{{r:.0f}} % of the best<extra>%{{theta}}</extra>",
            }
        )
        middle = left + 0.5 * width
        notes.append(
            note(f"<b>{label}</b>", middle, top - 0.05 * height, "paper", yanchor="middle", font={"size": 15})
        )
    return figure(
        data,
        f"What each deployment is good at, at {load:.4g} {grid.unit}",
        "Rim: the best of all deployments in this respect. Half the way: half as good. A larger area is better",
        showlegend=False,
        annotations=notes,
        height=120 + 270 * rows,
        **layout,
    )


def ranks(grid: Grid) -> Figure:
    """The places of the deployments over the loads, as the rings of the paper's figure 17."""
    names = ("TTFT", "TPOT", "throughput", "SLO attainment")
    count = len(grid.labels)
    data: list[Trace] = []
    for n, axis in enumerate((0, 1, 3, 4)):
        suffix = "" if n == 0 else str(n + 1)
        for position, label in enumerate(grid.labels):
            points = []
            for load in grid.loads:
                values = {other: _strengths(run.total)[axis] for _, other, run in grid.at(load)}
                if label in values:
                    points.append((load, 1 + sum(value > values[label] for value in values.values())))
            x, y = [f"{load:.4g}" for load, _ in points], [place for _, place in points]
            line = scatter(label, x, y, f"{label}: place %{{y}} at %{{x}}", axes=suffix, mode="lines+markers")
            line["line"] = {"color": color_of(position), "width": 3, "shape": "spline"}
            data.append({**line, "showlegend": n == 0, "marker": {"color": color_of(position), "size": 11}})
    layout: dict[str, Any] = {}
    notes = []
    for n, name in enumerate(names):
        suffix = "" if n == 0 else str(n + 1)
        begin = n / len(names)
        layout[f"xaxis{suffix}"] = {
            "domain": [begin + 0.01, begin + 1 / len(names) - 0.02],
            "anchor": f"y{suffix}",
            "type": "category",
            **titled(grid.load_title if n == 0 else ""),
            "showgrid": False,
        }
        layout[f"yaxis{suffix}"] = {
            "range": [count + 0.5, 0.5],
            "tickvals": list(range(1, count + 1)),
            "anchor": f"x{suffix}",
            "showticklabels": n == 0,
            **titled("place" if n == 0 else ""),
            "zeroline": False,
        }
        notes.append(note(f"<b>{name}</b>", 0.5, 1.02, f"x{suffix} domain"))
    return figure(
        data,
        "Who is best as the load grows",
        "Places by median TTFT, median TPOT, output tokens a second and good requests; 1 is best",
        annotations=notes,
        margin={"l": 60, "r": 30, "t": 118, "b": 60},
        height=240 + 30 * count,
        **layout,
    )


def stages(grid: Grid) -> Figure | None:
    """Mean milliseconds in each stage as the gateway saw it; None where no server reported stages."""
    load = grid.telling
    means: dict[str, dict[str, float]] = {}
    for _, label, run in reversed(grid.at(load)):
        if of := stage_means([record for record in run.records if record.succeeded]):
            means[label] = of
    if not means:
        return None
    found = {name for of in means.values() for name in of}
    order = [name for name in STAGE_COLORS if name in found] + sorted(found - STAGE_COLORS.keys())
    data = [
        bars(
            name.replace("_", " "),
            [round(MS * of.get(name, 0.0), 3) for of in means.values()],
            list(means),
            STAGE_COLORS.get(name, "#888888"),
            f"{name.replace('_', ' ')}: %{{x:.1f}} ms<extra>%{{y}}</extra>",
        )
        for name in order
    ]
    return figure(
        data,
        f"Where the time goes, at {load:.4g} {grid.unit}",
        "Mean milliseconds of a request in each stage as the gateway saw it; of two at once the earlier counts",
        barmode="stack",
        xaxis=titled("milliseconds, mean of all requests"),
        yaxis={"type": "category"},
        legend={"traceorder": "normal"},
        height=max(300, 180 + 36 * len(means)),
    )


def _strengths(of: WindowSummary) -> list[float]:
    """The figures on the axes in _AXES, turned so that more is better."""
    return [
        _inverse(of, "ttft_scheduled", "median"),
        _inverse(of, "tpot", "median"),
        _inverse(of, "e2el_scheduled", "p99"),
        of.output_token_throughput,
        of.attainment.value,
        of.effective_throughput_per_device,
    ]


def _inverse(of: WindowSummary, name: str, statistic: str) -> float:
    value = of.ms(name, statistic) or 0.0
    return 1 / value if value > 0 else 0.0
