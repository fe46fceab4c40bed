"""The report: figures that plotly accepts, a page that needs nothing else, and what a browser makes of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from html import escape
from pathlib import Path

import plotly.graph_objects as go
import pytest
from bench_runs import failed, good, loaded, measured
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.bench.outputs import missed, vllm_result
from epd_serve.bench.report.page import browser, plots, write_pngs, write_report
from epd_serve.bench.report.series import grids
from epd_serve.bench.report.table import html_tables, rows
from epd_serve.bench.report.timeline import pieces, timelines
from epd_serve.bench.report.verdict import verdicts
from epd_serve.bench.summary import Measured, public_settings, summarise
from epd_serve.bench.types import StageSpan

RATES = (2.0, 6.0, 12.0)


def comparison() -> list[Measured]:
    """Two deployments, which carry about 3 and 6 requests a second."""
    servers = {"EPD": 3.0, "E-P-D": 6.0}
    return [loaded(label, rate, capacity=capacity) for label, capacity in servers.items() for rate in RATES]


CASES = {
    "comparison": comparison,
    "sweep": lambda: [loaded("EPD", rate, capacity=5) for rate in RATES],
    "run": lambda: [loaded("EPD", 2, capacity=5)],
    "several at one rate": lambda: [loaded(label, 2, capacity=5) for label in ("EPD", "E-P-D", "<b>&\"'")],
    "closed loop": lambda: [measured([good(0, 0.0), good(1, 0.2)], rate=None, arrivals="closed:4")],
    "failures alone": lambda: [measured([failed(0, 0.0)]), measured([failed(0, 0.0)], rate=4)],
    "one token": lambda: [measured([good(0, 0.0)])],
}


def test_every_plot_table_and_verdict_says_that_devices_are_emulated(tmp_path: Path) -> None:
    runs = comparison()
    for run in runs:
        run.settings.emulated = "emulated h200"
    (grid,) = grids(runs)
    figures = [*plots(grid).values(), *(one for of_run in timelines(runs).values() for one in of_run)]
    assert len(figures) > 8
    for figure in figures:
        assert "emulated h200" in figure["layout"]["title"]["text"]
    for text in (html_tables(grid), *verdicts(runs, 0.9)):
        assert "emulated h200" in text
    settings, records = runs[0].settings, runs[0].records
    summary = summarise(settings, records, {record.index: record.scheduled_s for record in records})
    assert summary.warnings[0].startswith("The devices are emulated h200: queues and")


@pytest.mark.parametrize("name", CASES)
def test_plotly_takes_every_figure(name: str) -> None:
    """Its Python classes know each property of each trace and refuse what plotly.js would pass over."""
    runs: Sequence[Measured] = CASES[name]()
    for grid in grids(runs):
        figures = list(plots(grid).values())
        for some in timelines(runs).values():
            figures += some
        for figure in figures:
            go.Figure(figure)
        assert html_tables(grid).count("<table") == len(grid.loads)


def test_which_plots_there_are() -> None:
    (grid,) = grids(comparison())
    assert list(plots(grid)) == [
        *("capacity", "attainment-map", "attainment", "answered", "throughput", "latency", "limits", "strengths"),
        *("places", "ttft", "tpot", "waiting", "stages"),
    ]
    (grid,) = grids(CASES["run"]())
    assert list(plots(grid)) == ["attainment", "limits", "waiting", "stages"]


def test_goodput_lies_between_the_loads_around_90_percent() -> None:
    (grid,) = grids(comparison())
    for label in grid.labels:
        shares = {load: run.summary.total.attainment.value for load, run in grid.of(label)}
        held = max(load for load, share in shares.items() if share >= 0.9)
        lost = min((load for load, share in shares.items() if share < 0.9), default=held)
        assert held <= grid.goodput(label) <= lost
    assert grid.goodput("EPD") < grid.goodput("E-P-D")
    (none,) = grids(CASES["failures alone"]())
    assert none.goodput("E-P-D") == 0


def test_the_share_that_goodput_needs_is_what_was_asked_for(tmp_path: Path) -> None:
    (grid,) = grids(comparison())
    (lenient,) = grids(comparison(), 0.3)
    assert lenient.goodput("EPD") > grid.goodput("EPD")
    assert "with 30% of requests" in str(plots(lenient)["capacity"])
    for figure in plots(lenient).values():
        go.Figure(figure)
    write_report(tmp_path / "report.html", comparison(), share=1.0)


def test_secrets_among_the_fields_are_not_passed_on(tmp_path: Path) -> None:
    (run,) = CASES["run"]()
    typed = '{"api_key": "s3cret", "max_tokens": 5}'
    run.settings.fields = json.loads(typed) | {"more": [{"password": "s3cret"}], "top_k": 3}
    run.settings.argv = ["bench", "--extra-body", typed, "--rate", "2"]
    write_report(tmp_path / "report.html", [run])
    text = (tmp_path / "report.html").read_text(encoding="utf-8") + json.dumps(vllm_result(run))
    assert "s3cret" not in text
    assert public_settings(run.settings)["fields"]["max_tokens"] == 5
    assert public_settings(run.settings)["argv"][-2:] == ["--rate", "2"]


def test_the_load_that_tells_deployments_apart_is_shown() -> None:
    """At 2 a second both are at 100 %, at 12 both are overloaded."""
    (grid,) = grids(comparison())
    assert grid.telling == 6


def test_rates_are_per_device_where_deployments_have_different_numbers() -> None:
    runs = [loaded("EPD", 4, capacity=5), loaded("E-P-D", 12, capacity=15, num_devices=3)]
    (grid,) = grids(runs)
    assert (grid.per_device, grid.loads) == (True, (4.0,))
    devices = {label: cells[0].text for label, cells in rows(grid, 4.0)}
    assert devices == {"EPD": "1", "E-P-D": "3"}


def test_the_best_of_a_column_is_marked_and_failures_are_seen() -> None:
    fast = [good(number, 0.1 * number) for number in range(20)]
    slow = [good(number, 0.1 * number, ttft_s=0.4) for number in range(10)]
    lost = [failed(number, 0.1 * number) for number in range(10, 20)]
    runs = [measured(fast, label="a"), measured([*slow, *lost], label="b")]
    (grid,) = grids(runs)
    (_, first), (_, second) = rows(grid, 2.0)
    assert [cell.text for cell in first[:4]] == ["1", "101", "10.0", "100.0"]
    assert first[1].is_best and first[3].is_best
    assert not second[1].is_best
    assert second[-1].is_bad and second[-1].text == "10"


def test_nothing_is_marked_that_is_within_noise() -> None:
    runs = [
        measured([good(n, 0.1 * n, ttft_s=ttft_s + 0.1 * (n % 5)) for n in range(20)], label=label)
        for label, ttft_s in (("a", 0.1), ("b", 0.12))
    ]
    (grid,) = grids([*runs, measured([good(0, 0.0, ttft_s=0.01)], label="one request")])
    assert not any(cell.is_best for _, cells in rows(grid, 2.0) for cell in cells)


def staged(capacity: float, **stages_s: float) -> list[Measured]:
    """A server under three loads, whose requests spend these parts of the time to the first token in stages."""
    runs = []
    for rate in RATES:
        run = loaded("E-P-D", rate, capacity=capacity)
        for record in run.records:
            assert record.ttft_s is not None
            at_s, spans = 0.0, []
            for stage, part in stages_s.items():
                spans.append(StageSpan(stage=stage, start_s=at_s, duration_s=part * record.ttft_s))
                at_s += part * record.ttft_s
            record.stages = spans
        runs.append(run)
    return runs


@pytest.mark.parametrize(
    ("runs", "sentence"),
    [
        (
            staged(4, queue=0.1, encode=0.2, prefill=0.7),
            "too few to be sure); first to break, at 6, is TTFT, for want of prefill",
        ),
        (
            staged(4, queue=0.1, encode=0.8, prefill=0.1),
            "first to break, at 6, is TTFT, for want of encode",
        ),
        (
            staged(100, queue=1.0),
            "holds the limits at 12 req/s, the highest that was tried: 100 %",
        ),
        (
            [loaded("E-P-D", 12, capacity=1)],
            "breaks the limits at 12 req/s: 2 % of the requests were good; what",
        ),
        ([measured([failed(0, 0.0), failed(1, 0.1)])], "is the answer itself (2 of 2 requests failed: connect)"),
        ([loaded("E-P-D", 2, capacity=5, seconds=3)], "(61 to 100 % with 6 requests: too few to be sure)"),
    ],
)
def test_the_verdict_is_one_sentence(runs: list[Measured], sentence: str, tmp_path: Path) -> None:
    (found,) = verdicts(runs, 0.9)
    assert sentence in found
    write_report(tmp_path / "report.html", runs)
    assert escape(found, quote=True) in (tmp_path / "report.html").read_text()


def test_slo_that_was_missed_is_a_sentence() -> None:
    run = measured([good(0, 0.0), good(1, 0.5, ttft_s=3.0)], label="EPD")
    assert missed(run, 0.5) == ""
    assert "EPD, mine, 2 req/s: 1 of 2 requests (50.0%)" in missed(run, 0.9)


def test_the_page_stands_alone_and_names_are_no_markup(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(path, CASES["several at one rate"](), title="<i>Load</i>")
    text = path.read_text(encoding="utf-8")
    assert len(text) < 4_000_000
    assert not re.search(r"(src|href)=", text)
    assert "&lt;i&gt;Load&lt;/i&gt;" in text
    assert "<b>&\"'" not in text
    with pytest.raises(ValueError, match="no finished run"):
        write_report(path, [])


def _browser() -> str | None:
    try:
        return browser()
    except ValueError:
        return None


@pytest.mark.skipif(_browser() is None, reason="no browser that could draw")
def test_a_browser_draws_it(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(path, comparison())
    command = [str(_browser()), "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000"]
    command += [f"--user-data-dir={tmp_path}/profile", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, timeout=120, check=True)
    page = done.stdout.decode()
    assert 'data-ready="yes"' in page
    assert "cannot be drawn:" not in page.split("<script")[0]
    drawn = re.findall(r'data-figure="[a-z-]+" class="js-plotly-plot"', page)
    assert len(drawn) == 13
    assert page.count('class="main-svg"') >= 15


@pytest.mark.skipif(_browser() is None, reason="no browser that could draw")
def test_pictures_of_the_plots(tmp_path: Path) -> None:
    paths = write_pngs(tmp_path, [loaded("EPD", 2, capacity=5, seconds=2)])
    assert sorted(path.name for path in paths) == sorted(
        f"mine-{name}.png" for name in ("attainment", "limits", "waiting", "stages", "requests", "load")
    )
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_without_a_browser_pictures_say_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.delenv("BROWSER_PATH", raising=False)
    with pytest.raises(ValueError, match="install chromium"):
        write_pngs(tmp_path, CASES["run"]())


@given(
    st.lists(
        st.tuples(st.sampled_from(["encode", "prefill", "decode", "other"]), st.integers(0, 9), st.integers(0, 9)),
        max_size=6,
    )
)
def test_pieces_of_stages_cover_the_same_time_and_never_overlap(drawn: list[tuple[str, int, int]]) -> None:
    spans = [StageSpan(stage=stage, start_s=begin, duration_s=length) for stage, begin, length in drawn]
    found = pieces(spans)
    covered = {second for _, begin, length in drawn for second in range(begin, begin + length)}
    seconds = [second for _, begin, length in found for second in range(int(begin), int(begin + length))]
    assert sorted(covered) == sorted(seconds)
    encoded = {second for stage, begin, n in drawn if stage == "encode" for second in range(begin, begin + n)}
    mine = {s for stage, begin, n in found if stage == "encode" for s in range(int(begin), int(begin + n))}
    assert mine == encoded, "the encoder's time is never hidden behind P's waiting for it"


@pytest.mark.parametrize(
    ("arrivals", "load", "text"),
    [("trace", 2.0, "2 req/s"), ("ramp:1:4", 2.5, "2.5 req/s"), ("closed:3", 3.0, "3 at once")],
)
def test_every_kind_of_load_has_its_place(arrivals: str, load: float, text: str, tmp_path: Path) -> None:
    runs = [
        measured([good(index, index / 2) for index in range(20)], label=label, rate=None, arrivals=arrivals)
        for label in ("EPD", "E-P-D")
    ]
    (grid,) = grids(runs)
    assert grid.loads == (load,)
    assert grid.unit == text.split(" ", 1)[1]
    assert {run.load_text for run in runs} == {text}
    write_report(tmp_path / "report.html", runs)
