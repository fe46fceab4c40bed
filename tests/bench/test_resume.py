"""A tester that is killed in mid-run loses nothing and counts nothing twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from load_tester import Scripted, Scripts, session, settings
from scripted_server import NUM_TOKENS

from epd_serve.bench.run_directory import RunDirectory, RunWriter
from epd_serve.bench.types import Record
from epd_serve.bench.workloads import load_workload

ANSWER = "".join(f" t{index}" for index in range(NUM_TOKENS))
NUM_CONVERSATIONS, NUM_TURNS, NUM_ALONE = 4, 3, 20
NUM_REQUESTS = NUM_ALONE + NUM_CONVERSATIONS * NUM_TURNS


def workload(path: Path, gate: str) -> Path:
    """Its last request is not answered before ``gate`` is released: no run of it can be over too soon."""
    lines: list[dict[str, object]] = [{"prompt": f"steady {index}"} for index in range(NUM_ALONE - 1)]
    lines[5:5] = [
        {"turns": [f"steady c{one} t{turn}" for turn in range(NUM_TURNS)]} for one in range(NUM_CONVERSATIONS)
    ]
    lines.append({"prompt": f"hold {gate}"})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "epd_serve.cli", "bench", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_records(work_dir: Path, number: int) -> Path:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        for path in work_dir.glob("*/records.jsonl"):
            if path.read_bytes().count(b"\n") >= number:
                return path.parent
        time.sleep(0.02)
    raise AssertionError(f"not {number} records in time")


def check_whole(run: RunDirectory, scripted: Scripted) -> None:
    """Every request once, and none sent again that had its record."""
    records = run.records()
    assert [record.index for record in records] == list(range(NUM_REQUESTS))
    assert all(record.succeeded for record in records)
    sent = [one for one in scripted.log().values() if one["id"].startswith("bench-")]
    prefixes = {record.request_id.rpartition("-")[0] for record in records}
    times = Counter(int(one["id"].rpartition("-")[2]) for one in sent if one["id"].rpartition("-")[0] in prefixes)
    for record in records:
        if record.segment == 0:
            assert times[record.index] == 1
    # a later turn carries the answers that the server really gave
    by_id = {one["id"]: one["messages"] for one in sent}
    for record in records:
        if record.conversation is not None:
            assert [one["role"] for one in by_id[record.request_id]] == ["user", "assistant"] * record.turn + [
                "user"
            ]
            assert all(one["content"] == ANSWER for one in by_id[record.request_id] if one["role"] == "assistant")


def test_a_killed_run_is_resumed(scripted: Scripted, tmp_path: Path) -> None:
    wanted = ("--base-url", scripted.url, "--workload", f"custom:{workload(tmp_path / 'w.jsonl', 'killed')}")
    first = start(*wanted, "--rate", "15", "--work-dir", str(tmp_path / "runs"), "--warmups", "1")
    path = wait_for_records(tmp_path / "runs", 8)
    with pytest.raises(ValueError, match="another process works on this run"):
        RunWriter(RunDirectory.open(path))
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    early = RunDirectory.open(path).records()
    assert 8 <= len(early) < NUM_REQUESTS
    scripted.release("killed")
    with (path / "records.jsonl").open("ab") as file:  # as though it had been killed within a write
        file.write(b'{"index":31,"workload":"w","moda')

    second = start("--resume", str(path))
    output, _ = second.communicate(timeout=300)
    assert second.returncode == 0, output
    assert "was interrupted and resumed" in " ".join(output.split())
    run = RunDirectory.open(path)
    check_whole(run, scripted)
    assert [record for record in run.records() if record.segment == 0] == early
    assert [segment.ended for segment in run.segments()] == ["", "complete"]
    assert run.segments()[1].num_requests == NUM_REQUESTS - len(early)

    third = start("--resume", str(path))
    output, _ = third.communicate(timeout=300)
    assert third.returncode == 2
    assert "there is nothing to resume" in output


def test_ctrl_c_waits_for_what_is_under_way(scripted: Scripted, tmp_path: Path) -> None:
    wanted = ("--base-url", scripted.url, "--workload", f"custom:{workload(tmp_path / 'w.jsonl', 'stopped')}")
    first = start(*wanted, "--arrivals", "closed:4", "--work-dir", str(tmp_path / "runs"), "--warmups", "0")
    path = wait_for_records(tmp_path / "runs", 4)
    first.send_signal(signal.SIGINT)
    assert first.stdout is not None
    assert any("requests are on their way" in line for line in first.stdout)
    scripted.release("stopped")
    output, _ = first.communicate(timeout=300)
    assert first.returncode == 130
    assert "go on with --resume" in " ".join(output.split())
    run = RunDirectory.open(path)
    assert run.segments()[0].ended == "interrupted"
    assert len(run.records()) >= 8  # four were under way
    run, summary = session().resume(run, load_workload(f"custom:{tmp_path / 'w.jsonl'}"))
    assert summary is not None
    check_whole(run, scripted)


def test_another_workload_is_no_resumption(scripted: Scripted, tmp_path: Path) -> None:
    run, _ = session().begin(tmp_path / "run", settings(scripted.url, rate=100.0), Scripts(("steady", "refused")))
    with pytest.raises(ValueError, match="is not what it was"):
        session().resume(run, Scripts(("steady", "stall")))


def test_a_record_that_stands_twice_is_an_error(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", settings("http://127.0.0.1:1"), [(0, 0.0)])
    record = Record(index=0, workload="w", modality="text", scheduled_s=0.0, finish_s=1.0)
    with closing(RunWriter(run)) as writer:
        writer.write(record)
        writer.write(record)
    with pytest.raises(ValueError, match="request 0 stands there twice"):
        run.records()
