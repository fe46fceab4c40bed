"""The table of a comparison (003 table 5), as HTML and as rows for other forms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from epd_serve.bench.report.series import Grid, window
from epd_serve.bench.summary import MS, Measured
from epd_serve.bench.types import WindowSummary

#: Values that are so many standard errors apart differ by more than chance, 19 times of 20.
_SIGMAS = 1.96


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell; ``more``: small text behind its own; ``is_best``, ``is_bad``: within its column."""

    text: str
    more: str = ""
    is_best: bool = False
    is_bad: bool = False


@dataclass(frozen=True, kw_only=True)
class _Column:
    """One column.

    Attributes:
        short: its name on a terminal.
        best: min or max; None where no value is better. error: the standard error of a value.
    """

    name: str
    short: str
    value: Callable[[Measured], float | None]
    form: str
    more: Callable[[Measured], str] = lambda _: ""
    best: Callable[[Sequence[float]], float] | None = None
    error: Callable[[Measured], float] = lambda _: 0.0

    def text(self, value: float) -> str:
        return self.form.format(value) if self.form else _three_digits(value)


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


def _error_of_mean(name: str) -> Callable[[Measured], float]:
    def error(run: Measured) -> float:
        of = window(run).figures.get(name)
        return math.inf if of is None or of.n < 2 else MS * of.std / math.sqrt(of.n)

    return error


def _error_of_attainment(run: Measured) -> float:
    of = window(run).attainment
    return 100 * (of.high - of.low) / 2 / _SIGMAS


def _error_of_rate(value: Callable[[WindowSummary], float]) -> Callable[[Measured], float]:
    """The noise of a figure of requests that come by chance: by their number."""
    return lambda run: value(window(run)) / math.sqrt(max(window(run).num_succeeded, 1))


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
        error=_error_of_mean("ttft_scheduled"),
    ),
    _Column(
        name="TPOT (ms)",
        short="TPOT ms",
        value=_statistic("tpot", "mean"),
        form="",
        more=_p99("tpot"),
        best=min,
        error=_error_of_mean("tpot"),
    ),
    _Column(
        name="SLO attainment (%)",
        short="good %",
        value=_of(lambda of: 100 * of.attainment.value),
        form="{:.1f}",
        more=_interval,
        best=max,
        error=_error_of_attainment,
    ),
    _Column(
        name="effective tokens/s per device",
        short="eff tok/s",
        value=_of(lambda of: of.effective_throughput_per_device),
        form="{:.1f}",
        best=max,
        error=_error_of_rate(lambda of: of.effective_throughput_per_device),
    ),
    _Column(
        name="tokens/s",
        short="tok/s",
        value=_of(lambda of: of.output_token_throughput),
        form="{:.1f}",
        best=max,
        error=_error_of_rate(lambda of: of.output_token_throughput),
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
        best = _best(column, [run for _, run in runs])
        for (_, row), (_, run), value in zip(cells, runs, values, strict=True):
            if value is None:
                row.append(Cell(text="none", is_bad=True))
                continue
            text = column.text(value)
            is_bad = column.name == "failed" and value > 0
            row.append(Cell(text=text, more=column.more(run), is_best=value == best, is_bad=is_bad))
    return cells


def _best(column: _Column, runs: Sequence[Measured]) -> float | None:
    """The value that is better than all others of a column by more than chance; None where none is."""
    known = [(value, column.error(run)) for run in runs if (value := column.value(run)) is not None]
    if column.best is None or len(known) < 2:
        return None
    best = column.best([value for value, _ in known])
    (_, error), *equals = (one for one in known if one[0] == best)
    others = [one for one in known if one[0] != best]
    if equals or any(
        abs(value - best) <= _SIGMAS * math.hypot(error, own) or column.text(value) == column.text(best)
        for value, own in others
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


def _three_digits(value: float) -> str:
    """12.3, 123, 1234: as many digits as a reader compares."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
