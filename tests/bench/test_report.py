"""The report, the table of a comparison, and the exit code."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

import pytest
from bench_runs import failed, good, loaded, measured
from rich.console import Console

from epd_serve.bench.command import SLO_MISSED, Output
from epd_serve.bench.grid import make_grids, show_run, show_runs
from epd_serve.bench.report import write_report
from epd_serve.bench.run import Run

RATES = (2.0, 6.0, 12.0)


def comparison() -> list[Run]:
    """Two deployments, which carry about 3 and 6 requests a second."""
    servers = {"EPD": 3.0, "E-P-D": 6.0}
    return [loaded(label, rate, capacity=capacity) for label, capacity in servers.items() for rate in RATES]


CASES = {
    "comparison": comparison,
    "sweep": lambda: [loaded("EPD", rate, capacity=5) for rate in RATES],
    "several at one rate": lambda: [loaded(label, 2, capacity=5) for label in ("EPD", "E-P-D", "<b>&\"'")],
    "closed loop": lambda: [measured([good(0, 0.0), good(1, 0.2)], rate=None, arrivals="closed:4")],
    "trace": lambda: [measured([good(n, n / 2) for n in range(9)], rate=None, arrivals="trace")],
    "failures alone": lambda: [measured([failed(0, 0.0)]), measured([failed(0, 0.0)], rate=4)],
    "a label": lambda: [loaded("<b>&\"'", 2, capacity=5)],
    "one token": lambda: [measured([good(0, 0.0)])],
}


@pytest.mark.parametrize("name", CASES)
def test_page_and_terminal_show_every_run(name: str, tmp_path: Path) -> None:
    runs: Sequence[Run] = CASES[name]()
    path = tmp_path / "report.html"
    write_report(path, runs, 0.9)
    page = path.read_text(encoding="utf-8")
    title = escape(runs[0].label) if len({run.label for run in runs}) == 1 else "deployments under load"
    assert f"{title}</h1>" in page and "<b>&\"'" not in page
    assert not re.search(r"<(script|link|img)[^>]*(src|href)=", page), "it loads nothing"
    assert page.count('class="plotly-graph-div"') == 3
    assert page.count('<tr><td class="name">') == len(runs)
    (grid,) = make_grids(runs, 0.9)
    for label in grid.labels:
        assert escape(grid.verdict(label)) in page
    console = Console(file=io.StringIO(), width=80)
    show_run(console, runs[0])
    show_runs(console, runs, 0.9)
    assert isinstance(console.file, io.StringIO)
    assert "…" not in console.file.getvalue(), console.file.getvalue()


@pytest.mark.parametrize(
    ("lost", "late", "fail_on_slo", "code"),
    [(0, 0, True, 0), (1, 0, False, 1), (4, 0, False, 1), (0, 3, False, 0), (0, 3, True, 3), (3, 0, True, 3)],
)
def test_the_exit_code(lost: int, late: int, fail_on_slo: bool, code: int) -> None:
    """Of four requests, some fail and some are late; one that is lost misses the SLO as well."""
    records = [failed(n, n / 2) if n < lost else good(n, n / 2, ttft_s=9.0 if n < late else 0.1) for n in range(4)]
    output = Output(report=False, as_json=False, fail_on_slo=fail_on_slo, attainment=0.5)
    assert output.exit_code([measured([good(0, 0.0)]), measured(records)]) == code
    assert SLO_MISSED == 3
