"""The table of a comparison (003 table 5), as HTML and as rows for other forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from epd_serve.bench.report.series import Grid, window
from epd_serve.bench.summary import MS, Measured
from epd_serve.bench.types import WindowSummary


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell; ``more``: small text behind its own; ``is_best``, ``is_bad``: within its column."""

    text: str
    more: str = ""
    is_best: bool = False
    is_bad: bool = False


@dataclass(frozen=True, kw_only=True)
class _Column:
    """One column; ``best``: min or max, None where no value is better; ``short``: its name on a terminal."""

    name: str
    short: str
    value: Callable[[Measured], float | None]
    form: str
    more: Callable[[Measured], str] = lambda _: ""
    best: Callable[[Sequence[float]], float] | None = None
    scale: float = 1.0


def _statistic(name: str, statistic: str) -> Callable[[Measured], float | None]:
    def value(run: Measured) -> float | None:
        of = window(run).figures.get(name)
        return None if of is None else MS * float(getattr(of, statistic))

    return value


def _p99(name: str) -> Callable[[Measured], str]:
    def text(run: Measured) -> str:
        of = window(run).figures.get(name)
        return "" if of is None else f"p99 {_three_digits(MS * of.p99)}"

    return text


def _interval(run: Measured) -> str:
    of = window(run).attainment
    return f"{100 * of.low:.0f} to {100 * of.high:.0f}"


def _of(value: Callable[[WindowSummary], float]) -> Callable[[Measured], float | None]:
    return lambda run: value(window(run))


#: Those of the paper's table 5 first.
_COLUMNS = (
    _Column(name="devices", short="dev", value=lambda run: run.settings.num_devices, form="{:.0f}"),
    _Column(
        name="TTFT (ms)",
        short="TTFT ms",
        value=_statistic("ttft_scheduled", "mean"),
        form="",
        more=_p99("ttft_scheduled"),
        best=min,
    ),
    _Column(
        name="TPOT (ms)", short="TPOT ms", value=_statistic("tpot", "mean"), form="", more=_p99("tpot"), best=min
    ),
    _Column(
        name="SLO attainment (%)",
        short="good %",
        value=_of(lambda of: 100 * of.attainment.value),
        form="{:.1f}",
        more=_interval,
        best=max,
    ),
    _Column(
        name="effective tokens/s per device",
        short="eff tok/s",
        value=_of(lambda of: of.effective_throughput_per_device),
        form="{:.1f}",
        best=max,
    ),
    _Column(
        name="tokens/s", short="tok/s", value=_of(lambda of: of.output_token_throughput), form="{:.1f}", best=max
    ),
    _Column(name="requests", short="sent", value=_of(lambda of: of.num_requests), form="{:.0f}"),
    _Column(name="failed", short="failed", value=_of(lambda of: of.num_failed), form="{:.0f}"),
)

HEADER = ("deployment", *(column.name for column in _COLUMNS))
SHORT_HEADER = ("deployment", *(column.short for column in _COLUMNS))


def rows(grid: Grid, load: float) -> list[tuple[str, list[Cell]]]:
    """(deployment, its cells), in the order in which they were measured."""
    runs = [(label, run) for _, label, run in grid.at(load)]
    cells: list[tuple[str, list[Cell]]] = [(label, []) for label, _ in runs]
    for column in _COLUMNS:
        values = [column.value(run) for _, run in runs]
        known = [value for value in values if value is not None]
        best = column.best(known) if column.best and len(known) > 1 and len(set(known)) > 1 else None
        for (_, row), (_, run), value in zip(cells, runs, values, strict=True):
            if value is None:
                row.append(Cell(text="none", is_bad=True))
                continue
            text = column.form.format(value) if column.form else _three_digits(value)
            is_bad = column.name == "failed" and value > 0
            row.append(Cell(text=text, more=column.more(run), is_best=value == best, is_bad=is_bad))
    return cells


def html_tables(grid: Grid) -> str:
    """One table for each load; all but the chosen one are hidden by the page's script."""
    tables = []
    for load in grid.loads:
        lines = ["".join(f"<th>{escape(name)}</th>" for name in HEADER)]
        for label, cells in rows(grid, load):
            lines.append(f"<td>{escape(label)}</td>" + "".join(map(_html, cells)))
        body = "".join(f"<tr>{line}</tr>" for line in lines)
        tables.append(f'<table data-load="{load:.4g}">{body}</table>')
    telling = grid.telling
    chosen = {telling: " selected"}
    options = "".join(
        f'<option value="{load:.4g}"{chosen.get(load, "")}>{load:.4g} {escape(grid.unit)}</option>'
        for load in grid.loads
    )
    head = f'<div class="tablehead"><b>All deployments at</b><select class="loads">{options}</select>'
    head += "<span class='soft'>means; green: the best of a column</span></div>"
    if len(grid.labels) == 1:
        head = head.replace("All deployments at", f"{escape(grid.labels[0])} at").replace(
            "; green: the best of a column", ""
        )
    return f'<div class="card">{head}{"".join(tables)}</div>'


def _html(cell: Cell) -> str:
    kind = " class='best'" if cell.is_best else " class='bad'" if cell.is_bad else ""
    more = f" <small>{escape(cell.more)}</small>" if cell.more else ""
    return f"<td{kind}>{escape(cell.text)}{more}</td>"


def _three_digits(value: float) -> str:
    """12.3, 123, 1234: as many digits as a reader compares."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
