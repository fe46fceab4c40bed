"""``epd-serve bench --compare`` over real deployments, and what is made of its runs afterwards."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from epd_serve import cli
from epd_serve.bench.deployed import read_candidates

ROOT = Path(__file__).parents[2]
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
        monkeypatch.setattr(sys, "argv", ["epd-serve", "bench", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert isinstance(ended.value.code, int)
        return Said(ended.value.code, *capsys.readouterr())

    return run


def deployment(folder: Path, name: str, **settings: object) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps({"topology": "EPD", "instances": {"threads": 1}, **settings}))
    return path


@pytest.mark.slow
def test_deployments_are_measured_in_turn_under_one_schedule(tmp_path: Path, bench: Bench) -> None:
    """The second does not come up at first; with its file mended, the comparison goes on where it stood."""
    files = [deployment(tmp_path, "first"), deployment(tmp_path, "second", model="no-such-model")]
    work = tmp_path / "out"
    listed = ",".join(map(str, files))
    done = bench("--compare", listed, *LOAD, "--work-dir", str(work), "--slo-ttft-ms", "0.001", "--fail-on-slo")
    assert done.code == 1, done.out + done.err
    assert "not measured: EPD (second)" in done.out
    assert "there is no directory" in done.out, "why, in the words of epd-serve up"
    (path,) = work.iterdir()
    assert list(json.loads((path / "compare.json").read_text())["failed"]) == ["EPD (second)"]
    measured_before = (path / "EPD-(first)" / "rate-20" / "records.jsonl").stat()

    files[1].write_text(files[0].read_text())
    again = bench("--resume", str(path), "--fail-on-slo")
    assert again.code == 3, again.out + again.err
    assert "SLO missed: EPD (second), synthetic, 20 req/s: 0 of 6 requests" in again.out
    assert re.search(r"EPD \(first\) +1 .*EPD \(second\) +1 ", again.out, re.DOTALL)
    assert (path / "EPD-(first)" / "rate-20" / "records.jsonl").stat() == measured_before
    for rate, number in (("rate-20", 6), ("rate-30", 9)):
        first, second = (path / f"EPD-({name})" / rate for name in ("first", "second"))
        assert (first / "schedule.jsonl").read_bytes() == (second / "schedule.jsonl").read_bytes()
        digests = {json.loads((run / "run.json").read_text())["workload_digest"] for run in (first, second)}
        assert len(digests) == 1, "every byte of the requests is the same"
        records = [json.loads(line) for line in (first / "records.jsonl").read_text().splitlines()]
        assert len(records) == number
        assert not any("failure" in record for record in records)
        assert {file.suffix for file in (first / "performances" / "demo").iterdir()} == {".csv", ".json", ".jsonl"}
        assert json.loads((first / "result.json").read_text())["completed"] == number
    assert "report.html" in {file.name for file in path.iterdir()}
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [line for line in lines if any(file.name in part for part in line for file in files)]

    redrawn = bench("--redraw", str(path / "EPD-(first)"), "--fail-on-slo", "--attainment", "0.01", "--no-report")
    assert redrawn.code == 3
    limits = ["--slo-ttft-ms", "60000", "--slo-tpot-ms", "60000"]
    assert bench("--redraw", str(path / "EPD-(first)"), "--fail-on-slo", "--no-report", *limits).code == 0
    summaries = json.loads((path / "summary.json").read_text())
    assert [one["total"]["num_requests"] for one in summaries] == [6, 9, 6, 9]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--compare", "a.yaml", "--base-url", "http://127.0.0.1:1"], "leave --base-url out"),
        (["--compare", "gone.yaml"], "gone.yaml: No such file"),
        (["--compare", "gone.yaml", "--find-goodput"], "not with --find-goodput"),
        (["--redraw", "gone"], "gone holds no run"),
    ],
)
def test_what_cannot_be_compared_is_explained(arguments: list[str], says: str, bench: Bench) -> None:
    done = bench(*arguments)
    assert done.code == 2
    assert says in done.err


def test_labels_and_devices_of_deployments(tmp_path: Path) -> None:
    topologies = {"a": "E-P-D", "b": "(E-P)-D", "c": "EPD"}
    files = [deployment(tmp_path, name, topology=topology) for name, topology in topologies.items()]
    gpus = ["cuda:0", "cuda:1", "cuda:2"]
    files.append(deployment(tmp_path, "gpu", topology="E-P-D", devices=gpus))
    files.append(deployment(tmp_path, "pair", topology="(E-D)-P", devices=gpus[:2]))
    found = [(one.label, one.num_devices) for one in read_candidates(files)]
    assert found == [
        *(("E-P-D (a)", 1), ("(E-P)-D", 1), ("EPD", 1), ("E-P-D (gpu)", 3), ("(E-D)-P", 2)),
    ]
    (tmp_path / "b").mkdir()
    alike = [deployment(tmp_path, "x"), deployment(tmp_path / "b", "x"), deployment(tmp_path, "y")]
    assert [one.label for one in read_candidates(alike)] == [
        f"EPD ({tmp_path / 'x'})",
        f"EPD ({tmp_path / 'b' / 'x'})",
        "EPD (y)",
    ], "each has a directory of its own"
    with pytest.raises(ValueError, match=r"names .*c\.yaml twice"):
        read_candidates([*files, files[2]])
