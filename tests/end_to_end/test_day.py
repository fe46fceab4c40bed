"""The day's benchmark in small: every answer right or a clear error, nothing hangs, nothing leaks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import day


@pytest.mark.timeout(900)
def test_a_day_under_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "day.json"
    options = [
        "--seconds",
        "6",
        "--interval",
        "1.5",
        "--topology",
        "E-2P-2D",
        "--distinct",
        "9",
        "--faults",
        "kill",
    ]
    monkeypatch.setattr(sys, "argv", ["day", *options, "--output", str(output)])
    monkeypatch.setattr(day, "SLOWNESS", 0.5)
    monkeypatch.setattr(day, "MOST_GROWTH", 2.0)  # of a process that has hardly begun
    code = day.main()
    report: dict[str, Any] = json.loads(output.read_text())
    assert code == 0, json.dumps(report, indent=2)
    assert report["outcomes"]["identical"] > 0
    assert report["num_restarts"] == report["faults"]["kill"] > 0
    assert report["parts_of_the_day"]


def test_requests_arrive_by_the_hour() -> None:
    hours = list(day.arrivals(24_000, 1.0, seed=0))
    night, noon = (sum(begin <= hour < begin + 2 for hour in hours) for begin in (2, 11))
    assert hours == sorted(hours)
    assert night == pytest.approx(0.085 * 2000, rel=0.2)
    assert noon == pytest.approx(0.97 * 2000, rel=0.2)
    assert {one.key.startswith("video") for one in day.day_requests(16, seed=0)} == {True, False}
