"""Each part of ``python -m benchmarks.gpu`` runs in its smallest form on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the script needs Triton")

from benchmarks.gpu import PARTS

ROOT = Path(__file__).parents[2]
#: A row of each part, and what it must have.
ROWS = {
    "serve": ("tiny (E-P-D): 2 streams of 20 + 4, pictures of 56", "itl_ms"),
    "peer": ("2 streams of 20 + 4", "output_tokens_s"),
    "engine": ("tiny: decode, batch 4", "graph_gain"),
    "handoff": ("feature, tcp", "median_ms"),
    "colocation": ("processes", "encodes_s"),
    "attention": ("decode 2 x 64", "of_copy"),
    "sampling": ("4 rows, top_p 0.9", "sorted"),
    "startup": ("import proxy.main", "s"),
}


def run(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    file = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--output", str(file), "--tiny", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "EPD_SERVE_CACHE": str(tmp_path / "cache")}
    code = subprocess.run(command, cwd=ROOT, env=environment).returncode
    return code, json.loads(file.read_text())["parts"]


@pytest.mark.parametrize(
    "part",
    [part if part in ("attention", "sampling") else pytest.param(part, marks=pytest.mark.slow) for part in PARTS],
)
def test_a_part_runs_on_a_cpu(part: str, tmp_path: Path) -> None:
    code, parts = run(tmp_path, "--device", "cpu", "--only", part, "--limit", "10")
    assert (code, parts[part]["ended"]) == (0, "done"), parts
    rows = parts[part]["rows"]
    assert "failed" not in json.dumps(rows), rows
    if part == "tests":
        assert "passed" in rows["summary"]
    else:
        name, figure = ROWS[part]
        assert rows[name][figure] > 0 if figure != "itl_ms" else rows[name]["succeeded"] == rows[name]["requests"]


def test_what_a_part_measured_before_its_time_limit_is_kept(tmp_path: Path) -> None:
    code, parts = run(tmp_path, "--device", "cpu", "--only", "startup", "sampling", "--limit", "0.01")
    assert code == 1
    assert {part["ended"] for part in parts.values()} <= {"time limit of 0 s", "time limit of 1 s"}
