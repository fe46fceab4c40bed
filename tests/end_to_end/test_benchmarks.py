"""Benchmarks that no other test runs, each in its smallest form: its figures mean nothing, but it cannot rot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALLEST = {
    "batching": "--rounds 1 --share 0.05",
    "fuzz": "--topology EPD --requests 60 --frames 20",
    "gateway": "--rounds 1",
    "request_path": "",
    "soak": "--seconds 12 --period 4 --distinct 30",
    "switches": "--requests 12 --switches 2",
    "topologies": "--rounds 1 deploy/cpu-epd.yaml",
    "transfer": "table3 --tiny",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLEST)
def test_a_benchmark_runs_and_writes_its_result(name: str, tmp_path: Path) -> None:
    output = tmp_path if name == "transfer" else tmp_path / f"{name}.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", *SMALLEST[name].split(), "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    results = [json.loads(file.read_text()) for file in tmp_path.glob("*.json")]
    assert results and all(results), done.stdout[-2000:] + done.stderr[-2000:]
    if name == "soak":  # its caches are not full yet
        assert not (results[0]["wrong"] or results[0]["held"] or results[0]["restarts"])
    else:
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
