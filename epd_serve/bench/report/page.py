"""The HTML file: tables as they are, plots as packed JSON, plotly.js beside them; and the plots as pictures."""

from __future__ import annotations

import asyncio
import base64
import gzip
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import msgspec

from epd_serve.bench.report import distributions, rates, topologies
from epd_serve.bench.report.series import Grid, grids
from epd_serve.bench.report.table import html_tables
from epd_serve.bench.report.theme import GOODPUT_SHARE, TEMPLATES, Figure, marked
from epd_serve.bench.report.timeline import timelines
from epd_serve.bench.report.verdict import verdict
from epd_serve.bench.summary import Measured, file_name, public_settings

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
    lines = "".join(f"<p>{escape(verdict(grid, label))}</p>" for label in grid.labels)
    options = "".join(f"<option>{escape(name)}</option>" for name in runs)
    return (
        f'<section data-workload="{escape(grid.workload)}"><div class="verdict">{lines}</div>'
        f"<h2>{escape(grid.workload)}: a good answer has {grid.slo_text}</h2>"
        f'{html_tables(grid)}<div class="plots">{cards}</div>'
        f'<h2>One by one <select class="runs">{options}</select></h2><div class="timelines"></div>'
        f"{_warnings(grid)}</section>"
    )


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


#: Those that two fit into a row.
HALF = frozenset({"capacity", "attainment-map", "attainment", "answered"})


def plots(grid: Grid) -> dict[str, Figure]:
    """The plots of one workload, by name, without those that compare loads or deployments where there is one."""
    emulated = ", ".join(
        dict.fromkeys(run.settings.emulated for run in grid.runs.values() if run.settings.emulated)
    )
    return {name: marked(figure, emulated) for name, figure in _plots(grid) if figure is not None}


def _plots(grid: Grid) -> Iterator[tuple[str, Figure | None]]:
    several_loads, several_labels = len(grid.loads) > 1, len(grid.labels) > 1
    if several_loads and several_labels:
        yield "capacity", rates.capacity(grid)
        yield "attainment-map", rates.attainment_map(grid)
    yield "attainment", rates.attainment(grid)
    if several_loads:
        yield "answered", rates.keeps_up(grid)
        yield "throughput", rates.throughput(grid)
        yield "latency", rates.latency(grid)
    yield "limits", distributions.corners(grid)
    if several_labels:
        yield "strengths", topologies.radar(grid)
    if several_labels and several_loads:
        yield "places", topologies.ranks(grid)
    if several_labels or several_loads:
        yield "ttft", distributions.strips(grid, "ttft")
        yield "tpot", distributions.strips(grid, "tpot")
    yield "waiting", distributions.cumulative(grid)
    yield "stages", topologies.stages(grid)


WIDTH = 1100


def write_pngs(directory: Path, runs: Sequence[Measured], *, share: float = GOODPUT_SHARE) -> list[Path]:
    """``<workload>-<plot>.png`` for each plot of the report, and the first run's requests one by one.

    Raises ValueError where kaleido or a browser is missing.
    """
    figures: dict[str, Figure] = {}
    for grid in grids(runs, share):
        name = file_name(grid.workload)
        figures |= {f"{name}-{plot}": figure for plot, figure in plots(grid).items()}
        telling = [run for _, _, run in grid.at(grid.telling)][:1]
        for of_run in timelines(telling).values():
            figures[f"{name}-requests"], figures[f"{name}-load"] = of_run[:2]
    directory.mkdir(parents=True, exist_ok=True)
    paths = {directory / f"{name}.png": figure for name, figure in figures.items()}
    draw_pngs(paths)
    return list(paths)


def draw_pngs(figures: Mapping[Path, Figure]) -> None:
    """Draw each figure into its file. Raises ValueError where kaleido or a browser is missing."""
    try:
        from kaleido import Kaleido
    except ImportError:
        raise ValueError(f"pictures need kaleido: {_INSTALL}") from None
    os.environ.setdefault("BROWSER_PATH", browser())

    async def draw() -> None:
        async with Kaleido() as drawer:
            for path, figure in figures.items():
                layout = {**figure["layout"], "template": TEMPLATES["light"]}
                options: dict[str, Any] = {
                    "format": "png",
                    "width": WIDTH,
                    "height": layout["height"],
                    "scale": 1.5,
                }
                await drawer.write_fig({"data": figure["data"], "layout": layout}, path=path, opts=options)

    asyncio.run(draw())


_INSTALL = "pip install '.[bench]' in epd-serve's clone"
_BROWSERS = (
    "google-chrome",
    "chromium",
    "chromium-browser",
    "chrome",
    "chromium-headless-shell",
    "chrome-headless-shell",
)


def plotly_script() -> str:
    """plotly.js. Raises ValueError that says what to install where it is missing."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ValueError(f"the report's plots need plotly: {_INSTALL}") from None
    return str(get_plotlyjs())


def browser() -> str:
    """The browser that draws pictures. Raises ValueError where there is none."""
    for name in _BROWSERS:
        if path := shutil.which(name):
            return path
    raise ValueError("pictures are drawn by a browser; install chromium or google-chrome, or leave --png out")
