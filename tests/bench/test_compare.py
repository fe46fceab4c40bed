"""``epd-serve bench --compare`` over real deployments, and what is made of its runs afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from program import run_cli

from epd_serve.bench.run import Run

LOAD = ["--workload", "synthetic,image_share=0.5,image_size=64x64,output_tokens=4", "--rates", "20,30"]
LOAD += ["--duration", "0.3", "--warmups", "1"]


class Said(NamedTuple):
    code: int
    out: str
    err: str


Bench = Callable[..., Said]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Bench:
    """``epd-serve bench`` in this process; what it brings up are processes."""
    monkeypatch.setenv("COLUMNS", "150")

    def run(*arguments: str) -> Said:
        return Said(run_cli("bench", *arguments), *capsys.readouterr())

    return run


def deployment(folder: Path, name: str, **settings: object) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps({"topology": "EPD", "instances": {"threads": 1}, **settings}))
    return path


@pytest.mark.slow
def test_deployments_are_measured_in_turn_under_one_schedule(tmp_path: Path, bench: Bench) -> None:
    """The second does not come up; the third is the first again."""
    files = [deployment(tmp_path, "first"), deployment(tmp_path, "second", model="no-such-model")]
    files.append(deployment(tmp_path, "third"))
    listed = ",".join(map(str, files))
    work = tmp_path / "out"
    done = bench("--compare", listed, *LOAD, "--work-dir", str(work), "--slo-ttft-ms", "0.001", "--fail-on-slo")
    assert done.code == 1, done.out + done.err
    assert f"not measured: EPD ({tmp_path / 'second'})" in done.out
    assert "no-such-model" in done.out, "the error of epd-serve up"
    (path,) = work.iterdir()
    for rate, number in (("rate-20", 6), ("rate-30", 9)):
        runs = [Run.read(folder / rate) for folder in sorted(path.iterdir()) if (folder / rate).is_dir()]
        assert len(runs) == 2
        times = [[(record.scheduled_s, record.num_prompt_tokens) for record in run.records] for run in runs]
        assert times[0] == times[1] and len(times[0]) == number
        assert not any(record.failure for run in runs for record in run.records)
        folder = runs[0].path
        suffixes = {file.suffix for file in (folder / "performances" / "demo").iterdir()}
        assert suffixes == {".csv", ".json", ".jsonl"}
        assert json.loads((folder / "result.json").read_text())["completed"] == number
    assert "report.html" in {file.name for file in path.iterdir()}
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [line for line in lines if any(file.name in part for part in line for file in files)]

    redrawn = bench("--redraw", str(path), "--fail-on-slo", "--attainment", "0.01", "--no-report")
    assert redrawn.code == 3 and "synthetic, 20 req/s: 0 of 6 requests" in redrawn.out
    limits = ["--slo-ttft-ms", "60000", "--slo-tpot-ms", "60000"]
    assert bench("--redraw", str(path), "--fail-on-slo", "--no-report", *limits).code == 0
