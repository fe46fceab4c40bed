"""The plots as pictures, drawn by the browser that is there."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from epd_serve.bench.report.needs import browser
from epd_serve.bench.report.plots import plots
from epd_serve.bench.report.series import grids
from epd_serve.bench.report.theme import GOODPUT_SHARE, TEMPLATES, Figure
from epd_serve.bench.report.timeline import timelines
from epd_serve.bench.results import Measured, file_name

WIDTH = 1100
_SCALE = 1.5


def write_pngs(
    directory: Path, runs: Sequence[Measured], *, theme: str = "light", share: float = GOODPUT_SHARE
) -> list[Path]:
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
    asyncio.run(_draw({path: _themed(figure, theme) for path, figure in paths.items()}))
    return list(paths)


def _themed(figure: Figure, theme: str) -> Figure:
    return {"data": figure["data"], "layout": {**figure["layout"], "template": TEMPLATES[theme]}}


async def _draw(figures: dict[Path, Figure]) -> None:
    try:
        from kaleido import Kaleido
    except ImportError:
        raise ValueError("pictures need kaleido: pip install '.[bench]' in epd-serve's clone") from None
    os.environ.setdefault("BROWSER_PATH", browser())
    async with Kaleido() as drawer:
        for path, figure in figures.items():
            options: dict[str, Any] = {
                "format": "png",
                "width": WIDTH,
                "height": figure["layout"]["height"],
                "scale": _SCALE,
            }
            await drawer.write_fig(figure, path=path, opts=options)
