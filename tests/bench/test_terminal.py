"""All that is printed is whole, also in a file or on a terminal of 80 columns."""

from __future__ import annotations

import io

import pytest
from bench_runs import good, measured
from rich.console import Console

from epd_serve.bench.command import show_summary, show_sweep
from epd_serve.bench.server import sampled


@pytest.mark.parametrize("width", [80, 120])
def test_no_figure_is_cut(width: int) -> None:
    records = [
        good(index, index * 0.5, ttft_s=0.15 + index / 100, modality="image" if index % 2 else "text")
        for index in range(40)
    ]
    run = measured(records)
    console = Console(file=io.StringIO(), width=width)
    show_summary(console, run.settings, run.summary, sampled(run.samples))
    show_sweep(console, [(run.settings, run.summary)] * 2)
    assert isinstance(console.file, io.StringIO)
    assert "…" not in console.file.getvalue(), console.file.getvalue()
