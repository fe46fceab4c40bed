"""Roles over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

#: Okabe and Ito's, as in the load tester's reports.
COLORS = {"E": "#E69F00", "P": "#0072B2", "D": "#009E73"}
DRAINING, REBUILDING = "drains", "rebuilds"
#: (instance, "E", "P", "D", "drains" or "rebuilds", from, until), in seconds since the begin.
Span = tuple[str, str, float, float]


def roles_over_time(spans: Sequence[Span], title: str, subtitle: str, marks: Sequence[tuple[float, str]]) -> Any:
    """A bar for each state of an instance; ``marks``: times and what happened then."""
    names = sorted({name for name, *_ in spans})
    bars = []
    for state, color in {**COLORS, DRAINING: "#bbbbbb", REBUILDING: "#C0392B"}.items():
        some = [span for span in spans if span[1] == state]
        if some:
            bars.append(
                go.Bar(
                    name=state,
                    orientation="h",
                    x=[round(end - begin, 2) for _, _, begin, end in some],
                    y=[name for name, *_ in some],
                    base=[round(begin, 2) for _, _, begin, _ in some],
                    marker_color=color,
                )
            )
    plot = go.Figure(bars)
    for at_s, text in marks:
        plot.add_vline(at_s, line={"color": "#555555", "width": 1.5, "dash": "dash"}, annotation_text=text)
    plot.update_xaxes(title="seconds since the begin", rangemode="tozero")
    plot.update_yaxes(categoryorder="array", categoryarray=names[::-1], showgrid=False)
    return plot.update_layout(
        title=f"<b>{title}</b><br><span style='font-size:12px'>{subtitle}</span>",
        template="plotly_white",
        barmode="overlay",
        bargap=0.25,
        height=170 + 34 * len(names),
    )
