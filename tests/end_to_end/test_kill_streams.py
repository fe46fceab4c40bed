"""The kill benchmark in small: no client notices that instances die in the middle of its answer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_streams_go_on_while_every_role_dies(tmp_path: Path) -> None:
    output = tmp_path / "kills.json"
    options = ["--requests", "40", "--interval", "1.5", "--concurrency", "8", "--output", str(output)]
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.kill_streams", *options], cwd=ROOT, capture_output=True, text=True
    )
    assert output.exists(), result.stderr[-3000:]
    report = json.loads(output.read_text())
    assert result.returncode == 0 and report["passed"], json.dumps(report, indent=2)
    assert {name.rstrip("0123456789") for name in report["kills"]} == {"e", "p", "d"}
    assert report["continuations"] > 0
