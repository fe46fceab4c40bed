"""The chaos benchmark in small: every answer right or a clear error, nothing hangs, nothing leaks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transports import needs_mooncake

from benchmarks import chaos
from benchmarks.common import ROOT

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
def test_no_answer_is_wrong_while_the_only_instances_stop_and_the_disk_stalls(tmp_path: Path) -> None:
    """A pause, a hang until the replacement, and log files that nobody can write for seconds."""
    (tmp_path / "logs").mkdir()
    options = "--topology E-P-D --requests 60 --interval 2 --faults hang pause disk"
    script = (
        "truncate -s 64M disk && mkfs.ext4 -q disk && mount -o loop disk logs && "
        f"cd {ROOT} && EPD_SERVE_LOG_DIR={tmp_path}/logs "
        f"{sys.executable} -m benchmarks.chaos {options} --output {tmp_path}/chaos.json"
    )
    done = subprocess.run(["unshare", "--mount", "sh", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    if done.returncode and not (tmp_path / "chaos.json").exists() and "mount" in done.stderr.splitlines()[0]:
        pytest.skip(done.stderr)
    assert (tmp_path / "chaos.json").exists(), done.stderr
    report = json.loads((tmp_path / "chaos.json").read_text())
    assert done.returncode == 0, json.dumps(report, indent=2)
    assert report["faults"].keys() == {"hang", "pause", "disk"}


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
