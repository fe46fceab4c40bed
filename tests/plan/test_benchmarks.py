"""Benchmarks in their smallest form, and their tables from the results that are kept."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import transfer_reports, verify_field
from benchmarks.common import RESULTS, ROOT
from benchmarks.gateway.__main__ import table as gateway_table
from benchmarks.papers.__main__ import EXPERIMENTS, section
from benchmarks.plan_emulated import verdicts
from benchmarks.planner_rule import SIDES, TPOTS_S, Mix, bound_over


def kept(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return found


def test_the_simulator_is_timed(tmp_path: Path) -> None:
    output = tmp_path / "speed.json"
    command = [sys.executable, "-m", "benchmarks.planner", "--requests", "60", "--output", str(output)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    assert json.loads(output.read_text())["cpu_s"] > 0


@pytest.mark.parametrize("side", SIDES)
def test_bounds_are_compared_for_every_load(side: int) -> None:
    mix = Mix(side=side, share=float(side > 0), num_output_tokens=16, tpot_s=TPOTS_S[0])
    assert bound_over(mix, 3)["over"] <= 0.01, "as the page says of few devices"


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(lambda: len(list(verify_field.tables())), id="verify_field"),
        pytest.param(lambda: gateway_table(kept("gateway-cpu.json")).count("\n"), id="gateway"),
        pytest.param(
            lambda: sum(one["topologies"] for one in verdicts(kept("plan-emulated.json")["cells"])),
            id="plan_emulated",
        ),
        *(
            pytest.param(
                lambda name=name: transfer_reports.TABLES[name](kept(f"transfer-{name}.json")).row_count, id=name
            )
            for name in transfer_reports.TABLES
        ),
        *(
            pytest.param(lambda name=name: section(name, RESULTS / f"papers-{name}.json").count("\n"), id=name)
            for name in EXPERIMENTS
        ),
    ],
)
def test_tables_come_from_committed_results(rows: Callable[[], int]) -> None:
    assert rows() > 2
