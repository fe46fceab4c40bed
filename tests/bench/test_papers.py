"""The benchmark of the papers' tables in small: how runs are judged and printed, and one run from end to end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import write
from benchmarks.papers.__main__ import EXPERIMENTS
from benchmarks.papers.measure import Deployment, Limits, Load, Rows, go_on, judged, read, sheet
from epd_serve.bench.types import Failure, Record

SHAPE, KIND = "qwen2.5-vl-7b", "ascend-910b3"


def answer(index: int, *, at_s: float, ttft_s: float, gaps_s: list[float], **fields: Any) -> Record:
    times_s = [at_s + ttft_s]
    for gap_s in gaps_s:
        times_s.append(times_s[-1] + gap_s)
    return Record(
        index=index,
        workload="w",
        modality="image",
        scheduled_s=at_s,
        sent_s=at_s,
        first_token_s=times_s[0],
        token_times_s=times_s,
        last_event_s=times_s[-1],
        finish_s=times_s[-1],
        num_output_tokens=len(times_s),
        **fields,
    )


def deployment(*loads: Load, slowness: float = 1.0, num_devices: int = 1) -> Deployment:
    devices = (sheet(SHAPE, KIND),) * num_devices
    line = "EPD" if num_devices == 1 else "E-PD"
    return Deployment(name=line, topology=line, devices=devices, shape=SHAPE, slowness=slowness, loads=loads)


def test_figures_are_in_the_papers_units() -> None:
    narrow, wide = Limits(ttft_ms=500, tpot_ms=50), Limits(ttft_ms=1000, tpot_ms=50)
    gaps = Limits(ttft_ms=1000, tpot_ms=50, of_gaps=True)
    load = Load(name="l", workload="w", num_requests=4, limits=(narrow, wide))
    records = [
        answer(0, at_s=0.0, ttft_s=0.9, gaps_s=[0.09] * 10),
        answer(1, at_s=1.0, ttft_s=3.0, gaps_s=[0.1] * 10),
        answer(2, at_s=2.0, ttft_s=1.0, gaps_s=[0.15] * 10),
        answer(3, at_s=2.0, ttft_s=1.0, gaps_s=[0.1] * 10, failure=Failure.TIMEOUT),
    ]
    found = judged(records, deployment(load, slowness=2.0, num_devices=2), load)
    assert (found["failed"], found["attained"]) == (1, {"500/50": 0.25, "1000/50": 0.25})
    assert found["ttft_ms"] == pytest.approx((450 + 1500 + 500) / 3)
    assert found["tpot_ms_p50"] == pytest.approx(50)
    # five seconds of this clock are 2.5 of the paper's, on two devices
    assert found["throughput"] == pytest.approx(3 * 11 / 2.5 / 2)
    assert found["effective"]["500/50"] == pytest.approx(11 / 2.5 / 2)
    once_late = answer(4, at_s=0.0, ttft_s=0.9, gaps_s=[0.04] * 19 + [5.0])
    assert gaps.kept_by(once_late, 1.0) and not wide.kept_by(once_late, 1.0)


def row(one: Deployment, load: Load) -> dict[str, Any]:
    names = [str(limits) for limits in load.limits]
    times = {f"{name}{part}": 10.0 for name in ("ttft_ms", "tpot_ms") for part in ("", "_p50", "_p90")}
    about = {"deployment": one.name, "load": load.name, "rate": load.rate, "slowness": one.slowness}
    shares = {"attained": dict.fromkeys(names, 0.5), "effective": dict.fromkeys(names, 20.0)}
    return {**about, **times, **shares, "throughput": 40.0, "host_idle": 0.7}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_tables_compare_with_the_papers_for_one_run_or_all(name: str) -> None:
    deployments = EXPERIMENTS[name].deployments()
    assert len({one.name for one in deployments}) == len(deployments)
    rows: Rows = {(one.name, load.name): row(one, load) for one in deployments for load in one.loads}
    whole = EXPERIMENTS[name].report(rows)
    part = EXPERIMENTS[name].report(dict([next(iter(rows.items()))]))
    for text in (whole, part):
        for table in text.split("\n\n"):
            widths = {line.count("|") for line in table.splitlines() if line.startswith("|")}
            assert len(widths) <= 1, table
        assert "paper" in text
    assert len(whole) > len(part)


def test_finished_runs_are_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPD_SERVE_CACHE", str(tmp_path / "cache"))
    workload = "synthetic,image_share=1,image_size=112x112,text_tokens=8,output_tokens=6"
    limits = (Limits(ttft_ms=60_000, tpot_ms=60_000),)
    there = Load(name="there", workload=workload, num_requests=3, clients=3, limits=limits)
    missing = Load(name="missing", workload=workload, num_requests=4, rate=20.0, limits=limits)
    one = deployment(there, missing, slowness=2.0)
    output = tmp_path / "result.json"
    write(output, {"rows": [row(one, there)]})
    assert go_on([one], output, "command", 0.0) == 1, "the time is up"
    assert go_on([one], output, "command", time.monotonic() + 600) == 0
    rows = read(output)
    assert rows["EPD", "there"] == row(one, there), "it was not made again"
    found = rows["EPD", "missing"]
    assert (found["failed"], found["attained"]) == (0, {"60000/60000": 1.0})
    assert found["tpot_ms"] > 10, "a step reads 14 GB at 80 % of 1.6 TB/s"
    assert 0 <= found["host_idle"] <= 1
