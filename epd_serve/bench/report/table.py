"""The table of a comparison (003 table 5), as HTML and as rows for other forms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from epd_serve.bench.report.series import Grid
from epd_serve.bench.summary import MS, Measured

#: Values that are so many standard errors apart differ by more than chance, 19 times of 20.
_SIGMAS = 1.96


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell; ``more``: small text behind its own; ``is_best``, ``is_bad``: within its column."""

    text: str
    more: str = ""
    is_best: bool = False
    is_bad: bool = False


@dataclass(frozen=True, slots=True)
class _Value:
    """A value of a column, its standard error, and the small text behind it."""

    value: float
    error: float = 0.0
    more: str = ""


@dataclass(frozen=True, kw_only=True)
class _Column:
    """One column.

    Attributes:
        short: its name on a terminal.
        of: the value of a run; None where it has none.
        best: min or max; None where no value is better.
    """

    name: str
    short: str
    of: Callable[[Measured], _Value | None]
    form: Callable[[float], str]
    best: Callable[[Sequence[float]], float] | None = None


def _latency(name: str) -> Callable[[Measured], _Value | None]:
    def of(run: Measured) -> _Value | None:
        one = run.total.figures.get(name)
        if one is None:
            return None
        error = MS * one.std / math.sqrt(one.n) if one.n > 1 else math.inf
        return _Value(MS * one.mean, error, f"p99 {_three_digits(MS * one.p99)}")

    return of


def _attainment(run: Measured) -> _Value:
    one = run.total.attainment
    low, high = 100 * one.low, 100 * one.high
    return _Value(100 * one.value, (high - low) / 2 / _SIGMAS, f"{low:.0f} to {high:.0f}")


def _rate(name: str) -> Callable[[Measured], _Value]:
    """A figure of requests that come by chance: its noise is that of their number."""

    def of(run: Measured) -> _Value:
        value = float(getattr(run.total, name))
        return _Value(value, value / math.sqrt(max(run.total.num_succeeded, 1)))

    return of


def _three_digits(value: float) -> str:
    """12.3, 123, 1234: as many digits as a reader compares."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


_whole, _tenths = "{:.0f}".format, "{:.1f}".format
_PER_DEVICE, _TOKENS = _rate("effective_throughput_per_device"), _rate("output_token_throughput")
#: Those of the paper's table 5 first.
_COLUMNS = (
    _Column(name="devices", short="dev", of=lambda run: _Value(run.settings.num_devices), form=_whole),
    _Column(name="TTFT (ms)", short="TTFT ms", of=_latency("ttft_scheduled"), form=_three_digits, best=min),
    _Column(name="TPOT (ms)", short="TPOT ms", of=_latency("tpot"), form=_three_digits, best=min),
    _Column(name="SLO attainment (%)", short="good %", of=_attainment, form=_tenths, best=max),
    _Column(name="effective tokens/s per device", short="eff tok/s", of=_PER_DEVICE, form=_tenths, best=max),
    _Column(name="tokens/s", short="tok/s", of=_TOKENS, form=_tenths, best=max),
    _Column(name="requests", short="sent", of=lambda run: _Value(run.total.num_requests), form=_whole),
    _Column(name="failed", short="failed", of=lambda run: _Value(run.total.num_failed), form=_whole),
)

HEADER = ("deployment", *(column.name for column in _COLUMNS))
SHORT_HEADER = ("deployment", *(column.short for column in _COLUMNS))


def rows(grid: Grid, load: float) -> list[tuple[str, list[Cell]]]:
    """(deployment, its cells), in the order in which they were measured."""
    runs = [(label, run) for _, label, run in grid.at(load)]
    cells: list[tuple[str, list[Cell]]] = [(label, []) for label, _ in runs]
    for column in _COLUMNS:
        values = [column.of(run) for _, run in runs]
        best = _best(column, [one for one in values if one is not None])
        for (_, row), one in zip(cells, values, strict=True):
            if one is None:
                row.append(Cell(text="none", is_bad=True))
                continue
            is_bad = column.name == "failed" and one.value > 0
            row.append(Cell(text=column.form(one.value), more=one.more, is_best=one is best, is_bad=is_bad))
    return cells


def _best(column: _Column, values: Sequence[_Value]) -> _Value | None:
    """The value that is better than all others of a column by more than chance; None where none is."""
    if column.best is None or len(values) < 2:
        return None
    highest = column.best([one.value for one in values])
    best = next(one for one in values if one.value == highest)
    others = [one for one in values if one is not best]
    if any(
        abs(one.value - highest) <= _SIGMAS * math.hypot(best.error, one.error)
        or column.form(one.value) == column.form(highest)
        for one in others
    ):
        return None
    return best


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
    head += "<span class='soft'>means; green: the best of a column, by more than chance</span></div>"
    if len(grid.labels) == 1:
        head = head.replace("All deployments at", f"{escape(grid.labels[0])} at").replace(
            "; green: the best of a column, by more than chance", ""
        )
    return f'<div class="card">{head}{"".join(tables)}</div>'


def _html(cell: Cell) -> str:
    kind = " class='best'" if cell.is_best else " class='bad'" if cell.is_bad else ""
    more = f" <small>{escape(cell.more)}</small>" if cell.more else ""
    return f"<td{kind}>{escape(cell.text)}{more}</td>"
