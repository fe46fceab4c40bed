"""The kill benchmark in small: no client notices that instances die in the middle of its answer."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import chaos


@pytest.mark.slow
def test_streams_go_on_while_every_role_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "kills.json"
    options = ["--requests", "40", "--interval", "1.5", "--concurrency", "8", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["chaos", "--streams", *options])
    monkeypatch.setattr(chaos, "DEADLINE_S", 300.0)  # an answer may take long, and has to come
    for _ in range(3):  # a kill may hit an instance that has no stream at the moment
        code = chaos.main()
        report = json.loads(output.read_text())
        assert code == 0 and report["passed"], json.dumps(report, indent=2)
        assert {name.rstrip("0123456789") for name in report["kills"]} == {"e", "p", "d"}
        if report["continuations"]:
            break
    assert report["continuations"] > 0
