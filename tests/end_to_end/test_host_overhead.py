"""The benchmark of the host's overhead in small: no token comes before the device's step has ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import host_overhead


@pytest.mark.slow
def test_the_time_per_token_is_that_of_the_device_and_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPD_SERVE_CACHE", str(tmp_path / "cache"))
    output = tmp_path / "result.json"
    argv = ["--device", "ascend-910b3", "--streams", "2", "--contexts", "64", "--seconds", "3", "--settle", "0.2"]
    host_overhead.main([*argv, "--output", str(output)])
    result = json.loads(output.read_text())
    (cell,) = result["cells"]
    assert result["devices"] == "emulated ascend-910b3"
    assert cell["device_step_ms"] == pytest.approx(11.0, abs=0.2), "14 GB of weights at 80 % of 1.6 TB/s"
    assert cell["engine_step_ms"] > 0.98 * cell["device_step_ms"]
    assert cell["tpot_ms"] == pytest.approx(cell["engine_step_ms"], rel=0.3)
    assert cell["cpu_ms_per_step"]["engine"] > 0 and cell["cpu_ms_per_step"]["gateway"] > 0
