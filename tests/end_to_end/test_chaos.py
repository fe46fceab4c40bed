"""The chaos benchmark in small: every answer right or a clear error, nothing hangs, nothing leaks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transports import needs_mooncake

from benchmarks import chaos

NUM_REQUESTS = 18


def run(output: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["chaos", *options, "--output", str(output)])
    monkeypatch.setattr(chaos, "DEADLINE_S", 300.0)  # an answer may take long, and has to come
    code = chaos.main()
    report: dict[str, Any] = json.loads(output.read_text())
    assert code == 0, json.dumps(report, indent=2)
    return report


@pytest.mark.timeout(900)
@pytest.mark.parametrize("store", ["embedded", pytest.param("mooncake", marks=[needs_mooncake, pytest.mark.slow])])
def test_no_answer_is_wrong_while_everything_dies(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--requests", str(NUM_REQUESTS), "--seed", "1", "--concurrency", "6"]
    options += ["--store", store, "--transport", "mooncake" if store == "mooncake" else "auto"]
    for interval_s in (2, 8, 24):  # where what dies takes that long to start again, hardly any request is answered
        report = run(tmp_path / "chaos.json", monkeypatch, *options, "--interval", str(interval_s))
        outcomes = report["outcomes"]
        assert sum(outcomes.values()) == report["requests"] >= NUM_REQUESTS
        assert outcomes["wrong"] == outcomes["hang"] == 0
        assert report["leaks"] == {}
        if outcomes["identical"] > report["requests"] // 10:
            break
    killed = {name.rstrip("0123456789") for name in report["kills"]}
    assert killed == {"e", "p", "d"} | ({"master"} if store == "mooncake" else set())
    assert sum(report["kills"].values()) == sum(report["restarts"].values()) > 0
    assert outcomes["identical"] > report["requests"] // 10


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stop_s", [0.0, 8.0], ids=["replaced", "back"])
def test_no_stream_is_lost_while_the_only_d_is_stopped(
    stop_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--requests", "6", "--concurrency", "6", "--interval", "1", "--topology", "P-D"]
    options += ["--stop", str(stop_s), "--hang-timeout", str(30.0 if stop_s else 4.0)]
    report = run(tmp_path / "stop.json", monkeypatch, *options)
    assert report["outcomes"]["identical"] == 6


@pytest.mark.slow
def test_streams_go_on_while_every_role_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--streams", "--requests", "40", "--interval", "1.5", "--concurrency", "8"]
    for _ in range(3):  # a kill may hit an instance that has no stream at the moment
        report = run(tmp_path / "kills.json", monkeypatch, *options)
        assert report["passed"], report
        assert {name.rstrip("0123456789") for name in report["kills"]} == {"e", "p", "d"}
        if report["continuations"]:
            break
    assert report["continuations"] > 0
