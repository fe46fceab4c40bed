"""Write report.html: attainment and latency by load, requests that miss the SLO, and a table, in one file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape
from math import ceil
from pathlib import Path
from string import Template
from typing import Any

import msgspec

from epd_serve.bench.grid import HEADER, Grid, make_grids
from epd_serve.bench.run import Run
from epd_serve.bench.summary import MS, attains

#: Distinguishable with any colour vision (after Okabe and Ito).
COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#A6761D", "#7B68C8", "#555555")
_GOOD, _MISSED, _LIMIT = "#009E73", "#D55E00", {"color": "#C0392B", "dash": "dash", "width": 1.5}
#: Most points of one run in a plot; further requests are thinned out evenly.
_MAX_POINTS = 400
#: The plot of misses ends at this multiple of the limits; requests further out are drawn at its edge.
_EDGE = 3.0
_PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
body { margin: 0 auto; max-width: 1240px; padding: 16px 20px 40px; color: #1f2328;
       font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 6px 9px; border-bottom: 1px solid #d9dde2; vertical-align: bottom; }
.name { text-align: left; font-weight: 600; } pre { white-space: pre-wrap; word-break: break-all; }
</style></head>
<body><h1>$title</h1><p>$subtitle</p>
$sections
<details><summary>How it was measured</summary>$settings</details>
</body></html>
""")


def write_report(path: Path, runs: Sequence[Run], target: float) -> None:
    """Write one page about all runs: a single one, several loads, or several deployments.

    Args:
        target: attainment from which a load counts as served.

    Raises ImportError without plotly.
    """
    from plotly.offline import get_plotlyjs

    labels = list(dict.fromkeys(run.label for run in runs))
    models = ", ".join(dict.fromkeys(run.settings.model for run in runs))
    day = time.strftime("%Y-%m-%d", time.gmtime(runs[0].settings.created_unix_s))
    num_requests = sum(len(run.records) for run in runs)
    script = f'<script type="text/javascript">{get_plotlyjs()}</script>'
    page = _PAGE.substitute(
        title=escape(f"{len(labels)} deployments under load" if len(labels) > 1 else labels[0]),
        subtitle=escape(f"model {models} · {num_requests} requests in {len(runs)} runs · {day}"),
        sections=script + "".join(map(_section, make_grids(runs, target))),
        settings="".join(
            f"<b>{escape(f'{run.label}, {run.workload_name}, {run.load_text}')}</b>"
            f"<pre>{escape(msgspec.json.encode(run.settings).decode())}</pre>"
            for run in runs
        ),
    )
    path.write_text(page, encoding="utf-8")


def _section(grid: Grid) -> str:
    verdicts = "".join(f"<p><b>{escape(grid.verdict(label))}</b></p>" for label in grid.labels)
    config = {"displayModeBar": False, "responsive": True}
    plots = "".join(
        figure.to_html(full_html=False, include_plotlyjs=False, config=config) for figure in _figures(grid)
    )
    warnings = "".join(
        f"<li>{escape(f'{run.label}, {run.load_text}: {warning}')}</li>"
        for run in grid.runs.values()
        for warning in run.summary.warnings
    )
    return (
        f"<h2>{escape(grid.workload)}: a good answer has {escape(grid.slo_text)}</h2>{verdicts}{plots}"
        f"{_table(grid)}<details><summary>Warnings</summary><ul>{warnings}</ul></details>"
    )


def _table(grid: Grid) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in (grid.unit, *HEADER[1:]))
    body = "".join(
        f'<tr><td class="name">{escape(label)}</td><td>{load:.4g}</td>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for load in grid.loads
        for label, *cells in grid.rows(load)
    )
    return f'<div class="wide"><table><tr><th class="name">{HEADER[0]}</th>{head}</tr>{body}</table></div>'


def _figures(grid: Grid) -> list[Any]:
    """Return the plots of one workload as plotly figures."""
    emulated = ", ".join(dict.fromkeys(run.settings.emulated for run in grid.runs.values()))
    found = []
    for name, subtitle, plot in (_attainment(grid), _latency(grid), _misses(grid)):
        devices = f" · {emulated}" if emulated else ""
        plot.update_layout(
            title={
                "text": f"<b>{name}</b>{devices}<br><sub>{subtitle}</sub>",
                "x": 0.01,
                "y": 0.93,
                "yanchor": "top",
            },
            template="plotly_white",
            hovermode="closest",
            # below the plot, because long names would take its width on a narrow page
            legend={"orientation": "h", "yref": "container", "y": 0.01, "yanchor": "bottom"},
            margin={"l": 70, "r": 25, "t": 110, "b": 120},
        )
        found.append(plot)
    return found


def _attainment(grid: Grid) -> tuple[str, str, Any]:
    """Draw the paper's figures 8 and 12, with Wilson intervals."""
    from plotly.graph_objects import Figure, Scatter

    plot = Figure()
    for number, label in enumerate(grid.labels):
        shares = [run.total.attainment for _, run in grid.runs_of(label)]
        errors = {
            "symmetric": False,
            "array": [100 * (one.high - one.value) for one in shares],
            "arrayminus": [100 * (one.value - one.low) for one in shares],
        }
        x, y = [load for load, _ in grid.runs_of(label)], [100 * one.value for one in shares]
        text = [f"{one.part} of {one.whole}" for one in shares]
        plot.add_trace(Scatter(**_line(number, label), x=x, y=y, error_y=errors, text=text))
    plot.add_hline(100 * grid.target, line=_LIMIT)
    plot.update_xaxes(title=grid.unit, tickvals=grid.loads, rangemode="tozero")
    plot.update_yaxes(title="good requests, %", range=[-3, 106])
    plot.update_layout(height=480, showlegend=True)
    subtitle = f"Share of requests within the SLO, with 95 % intervals; dashed: {grid.target:.0%}"
    return "SLO attainment by load", subtitle, plot


def _latency(grid: Grid) -> tuple[str, str, Any]:
    """Draw the paper's figures 10, 11, 14 and 15."""
    from plotly.graph_objects import Scatter
    from plotly.subplots import make_subplots

    plot = make_subplots(cols=2, rows=1, horizontal_spacing=0.12)
    columns = (("ttft_scheduled", "TTFT, ms", grid.slo.ttft_ms), ("tpot", "TPOT, ms", grid.slo.tpot_ms))
    for column, (name, title, limit) in enumerate(columns, start=1):
        place = {"row": 1, "col": column}
        for number, label in enumerate(grid.labels):
            loads, some = zip(*grid.runs_of(label), strict=True)
            median, p99 = ([run.total.ms(name, one) for run in some] for one in ("median", "p99"))
            look = _line(number, label)
            plot.add_trace(Scatter(**look, x=loads, y=median, showlegend=column == 1), **place)
            look["line"] = {**look["line"], "width": 1, "dash": "dot"}
            plot.add_trace(Scatter(**look, x=loads, y=p99, showlegend=False), **place)
        plot.add_hline(limit, line=_LIMIT, **place)
        plot.update_xaxes(title=grid.unit, tickvals=grid.loads, rangemode="tozero", **place)
        plot.update_yaxes(title=title, type="log", dtick=1, **place)
    plot.update_layout(height=480)
    return "Latency by load", "Thick: median; dotted: 99th percentile; dashed: the limit", plot


def _misses(grid: Grid) -> tuple[str, str, Any]:
    """Draw TPOT over TTFT of each request: of all deployments at the decisive load, or of one at each load."""
    from plotly.graph_objects import Scatter
    from plotly.subplots import make_subplots

    if len(grid.labels) > 1:
        runs, where = grid.runs_at(grid.decisive_load), f" at {grid.decisive_load:.4g} {grid.unit}"
    else:
        runs, where = {f"{load:.4g} {grid.unit}": run for load, run in grid.runs_of(grid.labels[0])}, ""
    num_columns = min(3, len(runs))
    num_rows = ceil(len(runs) / num_columns)
    plot = make_subplots(
        rows=num_rows,
        cols=num_columns,
        subplot_titles=[f"{escape(name)}<br>{run.total.attainment.value:.0%} good" for name, run in runs.items()],
        vertical_spacing=0.3 / num_rows,
        x_title="TTFT from the scheduled time, ms",
        y_title="TPOT, ms",
    )
    ttft_ms, tpot_ms = grid.slo.ttft_ms, grid.slo.tpot_ms
    for number, run in enumerate(runs.values()):
        place = {"row": number // num_columns + 1, "col": number % num_columns + 1}
        shown = [one for one in run.records[:: ceil(len(run.records) / _MAX_POINTS)] if one.succeeded]
        x = [round(min(MS * (one.ttft_scheduled_s or 0.0), _EDGE * ttft_ms), 1) for one in shown]
        y = [round(min(MS * (one.tpot_s or 0.0), _EDGE * tpot_ms), 2) for one in shown]
        colors = [_GOOD if all(attains(one, run.settings)) else _MISSED for one in shown]
        text = [f"request {one.index}" for one in shown]
        marker = {"color": colors, "size": 5, "opacity": 0.6}
        plot.add_trace(Scatter(x=x, y=y, text=text, mode="markers", marker=marker), **place)
        limits = {"x0": 0, "y0": 0, "x1": ttft_ms, "y1": tpot_ms}
        plot.add_shape(type="rect", **limits, layer="below", line_width=0, fillcolor=_GOOD, opacity=0.14, **place)
    plot.update_xaxes(range=[0, 1.03 * _EDGE * ttft_ms], nticks=4)
    plot.update_yaxes(range=[0, 1.03 * _EDGE * tpot_ms], nticks=4)
    plot.update_layout(height=280 + 250 * num_rows, showlegend=False)
    subtitle = "One dot per request; green: within both limits; at the edge: further out; failures are not shown"
    return f"Where requests miss the SLO{where}", subtitle, plot


def _line(number: int, label: str) -> dict[str, Any]:
    """Return the style of a deployment, the same in all plots."""
    color, name = COLORS[number % len(COLORS)], escape(label)
    return {
        "mode": "lines+markers",
        "name": name,
        "legendgroup": name,
        "line": {"color": color, "width": 2.5},
        "marker": {"color": color, "symbol": number},
    }
