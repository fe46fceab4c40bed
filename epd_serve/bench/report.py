"""report.html: attainment and latency by load, where requests miss, and one table, in one file."""

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

#: Told apart with any kind of colour vision (after Okabe and Ito).
COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#A6761D", "#7B68C8", "#555555")
_GOOD, _MISSED, _LIMIT = "#009E73", "#D55E00", {"color": "#C0392B", "dash": "dash", "width": 1.5}
#: Requests of one run that a plot shows; of more, evenly spread ones.
_MOST_POINTS = 400
#: The plot of missed limits shows so many times the limit; what lies further out is drawn at its rim.
_RIM = 3.0
_PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
body { margin: 0 auto; max-width: 1240px; padding: 16px 20px 40px; color: #1f2328;
       font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 6px 9px; border-bottom: 1px solid #d9dde2; vertical-align: bottom; }
.name { text-align: left; font-weight: 600; } pre { white-space: pre-wrap; word-break: break-all; }
</style></head>
<body><h1>$title</h1><p>$subtitle</p>
$sections
<details><summary>How it was measured</summary>$settings</details>
</body></html>
""")


def write_report(path: Path, runs: Sequence[Run], share: float, *, title: str = "") -> None:
    """Write one page about all runs: a single one, several loads, or deployments side by side.

    Args:
        share: of good requests, from which a load counts as served.

    Raises ImportError where plotly is not installed.
    """
    from plotly.offline import get_plotlyjs

    found = make_grids(runs, share)
    labels = list(dict.fromkeys(run.label for run in runs))
    models = ", ".join(dict.fromkeys(run.settings.model for run in runs))
    day = time.strftime("%Y-%m-%d", time.gmtime(runs[0].settings.created_unix_s))
    num_requests = sum(len(run.records) for run in runs)
    script = f'<script type="text/javascript">{get_plotlyjs()}</script>'
    page = _PAGE.substitute(
        title=escape(title or (f"{len(labels)} deployments under load" if len(labels) > 1 else labels[0])),
        subtitle=escape(f"model {models} · {num_requests} requests in {len(runs)} runs · {day}"),
        sections=script + "".join(map(_section, found)),
        settings="".join(map(_settings, runs)),
    )
    path.write_text(page, encoding="utf-8")


def _section(grid: Grid) -> str:
    verdicts = "".join(f"<p><b>{escape(grid.verdict(label))}</b></p>" for label in grid.labels)
    config = {"displayModeBar": False, "responsive": True}
    plots = "".join(
        figure.to_html(full_html=False, include_plotlyjs=False, config=config) for figure in figures(grid)
    )
    warnings = "".join(
        f"<li>{escape(f'{run.label}, {run.load_text}: {warning}')}</li>"
        for run in grid.runs.values()
        for warning in run.summary.warnings
    )
    return (
        f"<h2>{escape(grid.workload)}: a good answer has {escape(grid.slo_text)}</h2>{verdicts}{plots}"
        f"{html_table(grid)}<details><summary>Remarks on these figures</summary><ul>{warnings}</ul></details>"
    )


def html_table(grid: Grid) -> str:
    """Return all runs of a workload as a table, by load."""
    head = "".join(f"<th>{escape(name)}</th>" for name in (grid.unit, *HEADER[1:]))
    body = "".join(
        f'<tr><td class="name">{escape(label)}</td><td>{load:.4g}</td>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for load in grid.loads
        for label, *cells in grid.rows(load)
    )
    return f'<table><tr><th class="name">{HEADER[0]}</th>{head}</tr>{body}</table>'


def figures(grid: Grid) -> list[Any]:
    """Return the plots of one workload as plotly's figures."""
    emulated = ", ".join(dict.fromkeys(run.settings.emulated for run in grid.runs.values()))
    found = []
    for name, subtitle, plot in (_attainment(grid), _latency(grid), _misses(grid)):
        devices = f" · {emulated}" if emulated else ""
        plot.update_layout(
            title={
                "text": f"<b>{name}</b>{devices}<br><sub>{subtitle}</sub>",
                "x": 0.01,
                "y": 0.98,
                "yanchor": "top",
            },
            template="plotly_white",
            hovermode="closest",
            # below the plot: beside it, long names would leave no room on a narrow page
            legend={"orientation": "h", "yref": "container", "y": 0.01, "yanchor": "bottom"},
            margin={"l": 70, "r": 25, "t": 110, "b": 120},
        )
        found.append(plot)
    return found


def _attainment(grid: Grid) -> tuple[str, str, Any]:
    """Draw the paper's figures 8 and 12, with Wilson's interval."""
    from plotly.graph_objects import Figure, Scatter

    plot = Figure()
    for number, label in enumerate(grid.labels):
        shares = [run.total.attainment for _, run in grid.of(label)]
        errors = {
            "symmetric": False,
            "array": [100 * (one.high - one.value) for one in shares],
            "arrayminus": [100 * (one.value - one.low) for one in shares],
        }
        x, y = [load for load, _ in grid.of(label)], [100 * one.value for one in shares]
        text = [f"{one.part} of {one.whole}" for one in shares]
        plot.add_trace(Scatter(**_line(number, label), x=x, y=y, error_y=errors, text=text))
    plot.add_hline(100 * grid.share, line=_LIMIT)
    plot.update_xaxes(title=grid.unit, tickvals=grid.loads, rangemode="tozero")
    plot.update_yaxes(title="good requests, %", range=[-3, 106])
    plot.update_layout(height=480, showlegend=True)
    subtitle = f"Share of requests within the SLO, with its 95 % interval; dashed: {grid.share:.0%}"
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
            x = [load for load, _ in grid.of(label)]
            median, p99 = ([run.total.ms(name, one) for _, run in grid.of(label)] for one in ("median", "p99"))
            look = _line(number, label)
            plot.add_trace(Scatter(**look, x=x, y=median, showlegend=column == 1), **place)
            look["line"] = {**look["line"], "width": 1, "dash": "dot"}
            plot.add_trace(Scatter(**look, x=x, y=p99, showlegend=False), **place)
        plot.add_hline(limit, line=_LIMIT, **place)
        plot.update_xaxes(title=grid.unit, tickvals=grid.loads, rangemode="tozero", **place)
        plot.update_yaxes(title=title, type="log", dtick=1, **place)
    plot.update_layout(height=480)
    return "Latency by load", "Thick: median; dotted: 99th percentile; dashed: the limit", plot


def _misses(grid: Grid) -> tuple[str, str, Any]:
    """Draw TTFT against TPOT of each request: of deployments where they differ most, of one at each load."""
    from plotly.graph_objects import Scatter
    from plotly.subplots import make_subplots

    if len(grid.labels) > 1:
        runs, where = grid.at(grid.telling_load), f" at {grid.telling_load:.4g} {grid.unit}"
    else:
        runs, where = {f"{load:.4g} {grid.unit}": run for load, run in grid.of(grid.labels[0])}, ""
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
        shown = [one for one in run.records[:: ceil(len(run.records) / _MOST_POINTS)] if one.succeeded]
        x = [round(min(MS * (one.ttft_scheduled_s or 0.0), _RIM * ttft_ms), 1) for one in shown]
        y = [round(min(MS * (one.tpot_s or 0.0), _RIM * tpot_ms), 2) for one in shown]
        colors = [_GOOD if all(attains(one, run.settings)) else _MISSED for one in shown]
        text = [f"request {one.index}" for one in shown]
        marker = {"color": colors, "size": 5, "opacity": 0.6}
        plot.add_trace(Scatter(x=x, y=y, text=text, mode="markers", marker=marker), **place)
        limits = {"x0": 0, "y0": 0, "x1": ttft_ms, "y1": tpot_ms}
        plot.add_shape(type="rect", **limits, layer="below", line_width=0, fillcolor=_GOOD, opacity=0.14, **place)
    plot.update_xaxes(range=[0, 1.03 * _RIM * ttft_ms], nticks=4)
    plot.update_yaxes(range=[0, 1.03 * _RIM * tpot_ms], nticks=4)
    plot.update_layout(height=280 + 250 * num_rows, showlegend=False)
    subtitle = "Dots are requests; green: within both limits; at the rim: further out; failures are not shown"
    return f"Where requests miss the SLO{where}", subtitle, plot


def _line(number: int, label: str) -> dict[str, Any]:
    """Return the look of a deployment, the same in all plots."""
    color, name = COLORS[number % len(COLORS)], escape(label)
    return {
        "mode": "lines+markers",
        "name": name,
        "legendgroup": name,
        "line": {"color": color, "width": 2.5},
        "marker": {"color": color, "symbol": number},
    }


def _settings(run: Run) -> str:
    name = f"{run.label}, {run.workload_name}, {run.load_text}"
    return f"<b>{escape(name)}</b><pre>{escape(msgspec.json.encode(run.settings).decode())}</pre>"
