"""The pods of rendered manifests under load, on a kubelet over namespaces."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.podlab.network import is_possible

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_rollouts_and_lost_pods_fail_no_request(tmp_path: Path) -> None:
    if not is_possible():
        pytest.skip("pods are made of namespaces, overlayfs and nftables, which take root and a kernel with them")
    output = tmp_path / "podlab.json"
    command = ["benchmarks.podlab", "--requests", "12", "--concurrency", "2", "--output", str(output)]
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    report = json.loads(output.read_text())
    assert len(report["phases"]) == 7
    assert all(phase["requests"] for phase in report["phases"].values())
    assert all(len(ports) > 1 for ports in report["ports"]["listening"].values())
