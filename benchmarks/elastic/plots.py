"""Roles over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from epd_serve.bench.report.theme import Trace, bars, figure, titled

#: Okabe and Ito's, as in the load tester's reports.
COLORS = {"E": "#E69F00", "P": "#0072B2", "D": "#009E73"}
DRAINING, REBUILDING = "drains", "rebuilds"
#: (instance, "E", "P", "D", "drains" or "rebuilds", from, until), in seconds since the begin.
Span = tuple[str, str, float, float]


def roles_over_time(spans: Sequence[Span], title: str, subtitle: str, marks: Sequence[tuple[float, str]]) -> Any:
    """A bar for each state of an instance; ``marks``: times and what happened then."""
    names = sorted({name for name, *_ in spans})
    data: list[Trace] = []
    for state, color in {**COLORS, DRAINING: "#bbbbbb", REBUILDING: "#C0392B"}.items():
        some = [span for span in spans if span[1] == state]
        if some:
            lengths = [round(end - begin, 2) for _, _, begin, end in some]
            begins = [round(begin, 2) for _, _, begin, _ in some]
            data.append(bars(state, lengths, [name for name, *_ in some], color, "%{x} s", base=begins))
    shapes = [
        {
            "type": "line",
            "x0": at_s,
            "x1": at_s,
            "y0": 0,
            "y1": 1,
            "yref": "paper",
            "line": {"color": "#555555", "width": 1.5, "dash": "dash"},
            "label": {
                "text": text,
                "textangle": 0,
                "textposition": "end",
                "xanchor": "left",
                "yanchor": "bottom",
                "font": {"size": 11},
            },
        }
        for at_s, text in marks
    ]
    return figure(
        data,
        title,
        subtitle,
        barmode="overlay",
        bargap=0.25,
        shapes=shapes,
        xaxis=titled("seconds since the begin", rangemode="tozero"),
        yaxis={"categoryorder": "array", "categoryarray": names[::-1], "showgrid": False},
        height=170 + 34 * len(names),
        legend={"traceorder": "normal"},
    )
