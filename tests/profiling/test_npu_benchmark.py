"""The script for a machine with an NPU, on a machine without one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the native extra")

from benchmarks import npu
from device import ascend


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["npu", *arguments])
    return npu.main()


@pytest.mark.skipif(ascend.missing() is None, reason="it would measure the NPU")
def test_it_says_that_there_is_no_npu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch) == 2
    assert f"needs an Ascend NPU, and there is none: {ascend.missing()}" in capsys.readouterr().err


def test_its_parts_run_with_tiny_sizes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = result_of(monkeypatch, tmp_path, "operators", "parity", "transfer")
    assert all(set(row) == {"ours", "torch"} and min(row.values()) > 0 for row in result["operators"].values())
    assert result["parity"] == {"relative_error": 0}
    assert min(result["transfer"].values()) > 0
    assert [target["passed"] for target in result["targets"]] == [True]


@pytest.mark.slow
def test_its_other_parts_run_with_tiny_sizes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = result_of(monkeypatch, tmp_path, "checks", "engine", "colocation")
    assert all(row["passed"] for row in result["checks"])
    assert result["engine"]["tiny"]["decode, batch 4"]["graph"]["ms"] > 0
    assert next(iter(result["colocation"])) == "two processes", "shares are off first"
    assert result["colocation"]["two streams"]["increase"][1][1] is not None


def result_of(monkeypatch: pytest.MonkeyPatch, folder: Path, *parts: str) -> dict[str, Any]:
    file = folder / "npu.json"
    assert run(monkeypatch, "--device", "cpu", "--tiny", "--out", str(file), "--only", *parts) == 0
    result: dict[str, Any] = json.loads(file.read_text())
    return result
