"""The HTML file: tables as they are, plots as packed JSON, plotly.js beside them, also packed."""

from __future__ import annotations

import base64
import gzip
import re
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import msgspec

from epd_serve.bench.report.needs import plotly_script
from epd_serve.bench.report.plots import HALF, plots
from epd_serve.bench.report.series import Grid, grids
from epd_serve.bench.report.table import html_tables
from epd_serve.bench.report.theme import GOODPUT_SHARE, TEMPLATES, Figure
from epd_serve.bench.report.timeline import timelines
from epd_serve.bench.results import Measured, public_settings

#: Runs whose requests are shown one by one, of each workload.
_MOST_TIMELINES = 12
_NUMBER = re.compile(r"[\d.,]*\d")


def write_report(path: Path, runs: Sequence[Measured], *, title: str = "", share: float = GOODPUT_SHARE) -> None:
    """One page about all runs: a single one, a sweep over loads, or deployments side by side.

    ``share`` of good requests, from which a load counts as served.

    Raises ValueError where plotly is not installed, and where there is no run.
    """
    if not runs:
        raise ValueError("there is no finished run to report on")
    found = grids(runs, share)
    sections, payload = [], {}
    for grid in found:
        figures = plots(grid)
        timeline = timelines(_shown_one_by_one(grid))
        payload[grid.workload] = {"figures": figures, "timelines": timeline}
        sections.append(_section(grid, figures, list(timeline)))
    page = Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))
    text = page.substitute(
        title=escape(title or _title(found)),
        subtitle=_subtitle(runs),
        navigation=_navigation(found),
        sections="\n".join(sections),
        settings=_settings(runs),
        plotly=_packed(plotly_script().encode()),
        figures=_packed(msgspec.json.encode({"templates": TEMPLATES, "workloads": payload})),
    )
    path.write_text(text, encoding="utf-8")


def _shown_one_by_one(grid: Grid) -> list[Measured]:
    """All deployments at the load that tells most; of one deployment all loads."""
    runs = [run for _, _, run in grid.at(grid.telling)]
    if len(grid.labels) == 1:
        runs = [run for _, run in reversed(grid.of(grid.labels[0]))]
    return runs[:_MOST_TIMELINES]


def _section(grid: Grid, figures: dict[str, Figure], runs: Sequence[str]) -> str:
    halves = HALF & figures.keys()
    if len(halves) % 2:
        halves = frozenset()
    cards = "".join(
        f'<div class="card{" half" if name in halves else ""}"><div data-figure="{name}"></div></div>'
        for name in figures
    )
    options = "".join(f"<option>{escape(name)}</option>" for name in runs)
    return (
        f'<section data-workload="{escape(grid.workload)}"><h2>{escape(_workload_text(grid))}</h2>'
        f'{html_tables(grid)}<div class="plots">{cards}</div>'
        f'<h2>One by one <select class="runs">{options}</select></h2><div class="timelines"></div>'
        f"{_warnings(grid)}</section>"
    )


def _workload_text(grid: Grid) -> str:
    slo = next(iter(grid.runs.values())).settings.slo
    return f"{grid.workload}: a good answer has TTFT ≤ {slo.ttft_ms:g} ms and TPOT ≤ {slo.tpot_ms:g} ms"


def _warnings(grid: Grid) -> str:
    """Sentences that differ in their numbers alone stand once, with all runs that they are about."""
    about: dict[str, list[tuple[str, str]]] = {}
    for run in grid.runs.values():
        for warning in run.summary.warnings:
            key = _NUMBER.sub("#", warning)
            about.setdefault(key, []).append((warning, f"{run.label}, {run.load_text}"))
    if not about:
        return ""
    lines = "".join(f"<li>{_remark(some)}</li>" for some in about.values())
    head = f"<summary>{len(about)} remarks on these figures</summary>"
    return f'<details>{head}<ul class="warnings">{lines}</ul></details>'


def _remark(some: Sequence[tuple[str, str]]) -> str:
    (warning, name), *others = some
    text = f"{escape(warning)} <small>({escape(name)}"
    if others:
        names = "; ".join(other for _, other in others)
        text += f"; with other figures also: {escape(names)}"
    return f"{text})</small>"


def _navigation(found: Sequence[Grid]) -> str:
    if len(found) < 2:
        return ""
    buttons = "".join(
        f'<button type="button" data-workload="{escape(grid.workload)}">{escape(grid.workload)}</button>'
        for grid in found
    )
    return f"<nav>{buttons}</nav>"


def _title(found: Sequence[Grid]) -> str:
    labels = list(dict.fromkeys(label for grid in found for label in grid.labels))
    if len(labels) > 1:
        return f"{len(labels)} deployments under load"
    return f"{labels[0]} under load"


def _subtitle(runs: Sequence[Measured]) -> str:
    models = ", ".join(dict.fromkeys(run.settings.model for run in runs))
    workloads = ", ".join(dict.fromkeys(run.workload_name for run in runs))
    requests = sum(len(run.records) for run in runs)
    begin = min(run.settings.created_unix_s for run in runs)
    day = time.strftime("%Y-%m-%d", time.gmtime(begin)) if begin else ""
    parts = [
        f"model {models}",
        workloads,
        f"{requests} requests in {len(runs)} runs" if len(runs) > 1 else "",
        day,
    ]
    return escape(" · ".join(part for part in parts if part))


def _settings(runs: Sequence[Measured]) -> str:
    lines = []
    for run in runs:
        settings: dict[str, Any] = {
            key: value for key, value in public_settings(run.settings).items() if value not in ("", None, {}, [])
        }
        line = msgspec.json.encode(settings).decode()
        lines.append(
            f"<b>{escape(f'{run.label}, {run.workload_name}, {run.load_text}')}</b><pre>{escape(line)}</pre>"
        )
    return "".join(lines)


def _packed(data: bytes) -> str:
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()
