"""Colours and templates of the plots, light and dark, and the frame that all of them share.

A figure is what plotly.js takes: ``{"data": [...], "layout": {...}}``. Nothing in it has a colour of background or
text: the page puts the template of the day around it, and so does the export.
"""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import Any

Figure = dict[str, Any]
Trace = dict[str, Any]

#: Told apart with any kind of colour vision, on white and on black (after Okabe and Ito).
COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#A6761D", "#7B68C8", "#888888")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star", "triangle-down", "cross", "hexagon")
DASHES = ("solid", "dash", "dot", "dashdot")
GOOD, BAD, LIMIT = "#009E73", "#D55E00", "#C0392B"
#: Of a request's time, waiting in greys; what comes later is drawn over what came before.
STAGE_COLORS = {
    "waits at the tester": "#767B82",
    "on its way": "#D5D9DE",
    "queue": "#A9B0B8",
    "encode": "#E69F00",
    "prefill": "#0072B2",
    "kv_transfer": "#CC79A7",
    "decode": "#009E73",
    "until the first token": "#0072B2",
    "tokens": "#009E73",
    "failed": "#C0392B",
}
#: Share of good requests from which a rate counts as served, where no other is wanted.
GOODPUT_SHARE = 0.9


def style(position: int) -> dict[str, Any]:
    """The style of one deployment's line and markers, the same in all plots."""
    color = color_of(position)
    return {
        "marker": {"color": color, "symbol": SYMBOLS[position % len(SYMBOLS)], "size": 8},
        "line": {"color": color, "width": 2.5, "dash": DASHES[position // len(COLORS) % len(DASHES)]},
    }


def color_of(position: int) -> str:
    return COLORS[position % len(COLORS)]


def figure(data: Sequence[Trace], title: str, subtitle: str, *, is_narrow: bool = False, **layout: Any) -> Figure:
    """A figure with a title that says what is seen and below it how to read it."""
    lines = wrap(subtitle, 84) if is_narrow else [subtitle]
    text = f"<b>{title}</b><br><span style='font-size:12px'>{'<br>'.join(lines)}</span>"
    frame: dict[str, Any] = {
        "title": {
            "text": text,
            "x": 0.01,
            "xanchor": "left",
            "y": 1,
            "yanchor": "top",
            "pad": {"t": 22},
            "font": {"size": 16},
        },
        "margin": {"l": 70, "r": 30, "t": 72 + 16 * len(lines), "b": 60},
        "height": 440,
        "hovermode": "closest",
    }
    return {"data": list(data), "layout": {**frame, **layout}}


def two_panels(
    data: Sequence[Trace], title: str, subtitle: str, axes: tuple[tuple[Any, Any], tuple[Any, Any]], **layout: Any
) -> Figure:
    """A figure of two panels side by side; ``axes``: (x, y) of the left one and of the right one."""
    (x, y), (x2, y2) = axes
    return figure(
        data,
        title,
        subtitle,
        xaxis={**x, "domain": [0, 0.43]},
        yaxis=y,
        xaxis2={**x2, "domain": [0.57, 1], "anchor": "y2"},
        yaxis2={**y2, "anchor": "x2"},
        **layout,
    )


def marked(plot: Figure, emulated: str) -> Figure:
    """A figure whose title says that devices are emulated; "": none is."""
    if emulated:
        plot["layout"]["title"]["text"] += f"<span style='font-size:12px'> · {emulated}</span>"
    return plot


def titled(text: str, **more: Any) -> dict[str, Any]:
    """An axis with a title."""
    return {"title": {"text": text}, **more}


def scatter(name: str, x: Sequence[Any], y: Sequence[Any], hover: str, *, axes: str = "", **more: Any) -> Trace:
    """A line, or markers; ``axes``: the number of its axes, as in "2"; ``hover``: the text beside a point."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "legendgroup": name,
        "x": x,
        "y": y,
        "xaxis": f"x{axes}",
        "yaxis": f"y{axes}",
        "hovertemplate": f"{hover}<extra></extra>",
        **more,
    }


def bars(name: str, x: Sequence[Any], y: Sequence[Any], color: Any, hover: str, **more: Any) -> Trace:
    """Horizontal bars."""
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "x": x,
        "y": y,
        "marker": {"color": color, "line": {"width": 0}},
        "hovertemplate": hover,
        **more,
    }


def note(text: str, x: float, y: float, xref: str, yref: str = "paper", **more: Any) -> dict[str, Any]:
    """A heading over a panel, to be put among the layout's annotations."""
    place = {"x": x, "y": y, "xref": xref, "yref": yref, "xanchor": "center", "yanchor": "bottom"}
    return {"text": text, **place, "showarrow": False, **more}


def limit_line(value: float, text: str, *, axis: str = "y", of: str = "") -> dict[str, Any]:
    """A dashed line at a limit, to be put among the layout's shapes; ``of``: the number of the axes, as in "2"."""
    along, across = ("x", "y") if axis == "y" else ("y", "x")
    return {
        "type": "line",
        f"{along}ref": f"{along}{of} domain",
        f"{across}ref": f"{across}{of}",
        f"{along}0": 0,
        f"{along}1": 1,
        f"{across}0": value,
        f"{across}1": value,
        "line": {"color": LIMIT, "width": 1.5, "dash": "dash"},
        "label": {
            "text": text,
            "font": {"color": LIMIT, "size": 11},
            "textposition": "end",
            **({"textangle": 0, "xanchor": "left", "yanchor": "top"} if axis == "x" else {"yanchor": "bottom"}),
        },
    }


def log_axis(name: str) -> dict[str, Any]:
    """A logarithmic axis in milliseconds whose ticks can be read."""
    ticks = [factor * 10**power for power in range(-1, 7) for factor in (1, 2, 5)]
    return {
        "type": "log",
        **titled(name),
        "tickvals": ticks,
        "ticktext": [
            f"{tick:,.4g}".replace(",", "\u2009") if tick < 1e4 else f"{tick / 1e3:g}k" for tick in ticks
        ],
    }


def _template(text: str, grid: str, paper: str) -> dict[str, Any]:
    axis = {"gridcolor": grid, "linecolor": grid, "zerolinecolor": grid, "automargin": True, "ticks": ""}
    return {
        "layout": {
            "font": {"color": text, "family": "system-ui, -apple-system, Segoe UI, sans-serif", "size": 13},
            "paper_bgcolor": paper,
            "plot_bgcolor": paper,
            "xaxis": axis,
            "yaxis": axis,
            "polar": {
                "bgcolor": paper,
                "radialaxis": {"gridcolor": grid, "linecolor": grid},
                "angularaxis": {"gridcolor": grid, "linecolor": grid},
            },
            "legend": {"bgcolor": "rgba(0,0,0,0)"},
            "hoverlabel": {"bgcolor": paper, "font": {"color": text}},
        }
    }


TEMPLATES = {
    "light": _template("#1f2328", "#e2e5e9", "#ffffff"),
    "dark": _template("#e6e6e6", "#3a3f46", "#16191d"),
}
