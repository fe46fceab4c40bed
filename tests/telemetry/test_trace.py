"""Processes write traces that viewers read, also after a kill; joined, a request's stages add up."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from program import run_cli

from epd_serve.telemetry.breakdown import read_traces, summary
from epd_serve.telemetry.span import DECODE_QUEUE, FEATURE_WAIT, PREFILL_QUEUE, STAGES, Span, Timeline, Value
from epd_serve.telemetry.trace_file import TraceWriter


def work(track: str, name: str, start_s: float, end_s: float, **about: Value) -> Span:
    """A span of a thread."""
    return Span(name, "", start_s, end_s, {"track": track, **about})


class Process:
    """A traced process whose clock can be set."""

    def __init__(self, directory: Path, name: str, *, wall_offset_s: float = 1e9) -> None:
        self.now = 0.0
        self.writer = TraceWriter(
            directory, name, clock=lambda: self.now, wall_clock=lambda: self.now + wall_offset_s
        )
        self.timeline = Timeline(lambda: self.now, self.writer.put)

    def at(self, now: float) -> Timeline:
        self.now = now
        return self.timeline


def serve_one(directory: Path, request_id: str = "r", *, close: bool = True) -> list[Process]:
    """A request with two images, of which the second decides: E 2.1 ... 6, P until 9, D until 20."""
    e, p, d = (Process(directory, name) for name in ("e0", "p0", "d0"))
    p.at(2).record_arrival(request_id, FEATURE_WAIT, hand_off=True)
    for item, batch_s, confirmed_s in (("one", (2.5, 3), 4), ("two", (3, 5), 6.2)):
        e.timeline.record_encode(request_id, item, 2.1, batch_s)
        e.at(confirmed_s).record_fetch(request_id, item, batch_s[1])
    p.at(6).record_features(request_id)
    p.timeline.record_step([(request_id, True)], [], 6.5, 9)
    d.at(9.5).record_arrival(request_id, DECODE_QUEUE)
    p.at(9.7).record_hand_over(request_id)
    d.timeline.record_step([], [request_id], 10, 11)
    d.at(20).record_end(request_id)
    e.writer.put(work("tower", "encode", 3, 5, images=2))
    d.writer.put(work("engine", "decode", 4, 7, decodes=3))
    if close:
        for process in (e, p, d):
            process.writer.close()
            process.writer.close()
            process.writer.put(work("engine", "too late", 0, 1))
    return [e, p, d]


def test_each_file_is_json_with_names_of_process_and_threads(tmp_path: Path) -> None:
    e, *_ = serve_one(directory := tmp_path / "traces")
    events = json.loads(e.writer.path.read_text())
    assert (directory.stat().st_mode & 0o777, e.writer.path.stat().st_mode & 0o777) == (0o700, 0o600)
    assert events[0] == {"ph": "M", "name": "process_name", "pid": os.getpid(), "tid": 0, "args": {"name": "e0"}}
    [track] = [event["tid"] for event in events if event["name"] == "thread_name"]
    [batch] = [event for event in events if event["ph"] == "X"]
    assert (batch["tid"], batch["ts"], batch["dur"], batch["args"]) == (track, 3e6, 2e6, {"images": 2})
    begins, ends = ([event for event in events if event["ph"] == phase] for phase in "be")
    assert [(b["id"], b["name"]) for b in begins] == [(e["id"], e["name"]) for e in ends]
    assert {b["id"] for b in begins} == {"r/one", "r/two"}


@pytest.mark.parametrize("close", [True, False])
def test_the_stages_of_a_request_add_up_on_its_critical_path(tmp_path: Path, close: bool) -> None:
    serve_one(tmp_path, close=close)
    gateway = TraceWriter(tmp_path, "gateway", clock=lambda: 0.0, wall_clock=lambda: 1e9)
    gateway.put(Span("gateway_receive", "r", 1, 2))
    gateway.put(Span("gateway_serve", "r", 2, 20.5))
    trace = read_traces(tmp_path)
    [request] = trace.requests
    found = {stage: round(seconds, 6) for stage, seconds in request.stages.items()}
    expected = (0.9, 2, 1, 0.5, 2.5, 0.5, 0.5, 10)
    assert found == dict(zip(STAGES, expected, strict=True))
    assert request.total_s == pytest.approx(20 - 2.1)
    rows = summary(trace.requests)["rows"]
    assert rows["gateway"]["mean_ms"] == pytest.approx(1000)
    assert rows["between"]["mean_ms"] == pytest.approx(1e3 * (18.5 - 17.9))
    assert rows["e2e"]["p95_ms"] == pytest.approx(19500)
    assert sum(rows[name]["share"] for name in (*STAGES, "gateway", "between")) == pytest.approx(1)
    whole = json.loads(trace.to_json())["traceEvents"]
    names = [event["args"]["name"] for event in whole if event["name"] == "process_name"]
    assert sorted(names) == ["d0", "e0", "gateway", "p0"]
    assert min(event["ts"] for event in whole if "ts" in event) == 0


def test_text_and_what_did_not_end(tmp_path: Path) -> None:
    pd = Process(tmp_path, "pd0")
    for name in ("text", "left", "failed"):
        pd.at(1).record_arrival(name, PREFILL_QUEUE, hand_off=False)
    pd.timeline.record_step([("text", True), ("left", True)], [], 2, 3)
    pd.timeline.record_step([], ["text", "left"], 3, 4)
    pd.at(5).record_end("text")
    pd.timeline.drop("left")
    pd.timeline.drop("failed")
    trace = read_traces(tmp_path)
    assert [request.request_id for request in trace.requests] == ["text"]
    assert [trace.requests[0].stages[stage] for stage in STAGES] == pytest.approx([0, 0, 0, 1, 1, 0, 0, 2])
    assert "e2e" not in summary(trace.requests)["rows"]


def test_clocks_of_two_hosts_are_joined_by_the_wall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = iter(("one", "two", "two"))
    monkeypatch.setattr("epd_serve.telemetry.trace_file._host_id", lambda: next(hosts))
    for name, offset in (("a", 100.0), ("b", 50.0), ("c", 50.25)):
        Process(tmp_path, name, wall_offset_s=offset).writer.put(work("engine", name, 1, 2))
    times = {event["name"]: event["ts"] for event in read_traces(tmp_path).events if event["ph"] == "X"}
    assert times == {"a": 50e6, "b": 0, "c": 0}, "b and c share a clock, whatever the wall's did meanwhile"


KILLED = """
import sys, time
from pathlib import Path
from epd_serve.telemetry.span import Span
from epd_serve.telemetry.trace_file import TraceWriter
writer = TraceWriter(Path(sys.argv[1]), "e0")
for number in range(10**9):
    writer.put(Span("encode", "", number, number + 1, {"track": "tower", "images": number}))
    if number == 1000:
        print("ready", flush=True)
"""


def test_a_process_that_is_killed_leaves_all_but_the_end(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGKILL)
    [path] = tmp_path.iterdir()
    events = json.loads(path.read_bytes() + b"]")
    numbers = [event["args"]["images"] for event in events if event["ph"] == "X"]
    assert numbers == list(range(len(numbers))) and len(numbers) > 1000
    path.write_bytes(path.read_bytes()[:-20])  # as after a power cut
    (tmp_path / "other.json").write_text('{"traceEvents": []}')
    assert len([event for event in read_traces(tmp_path).events if event["ph"] == "X"]) == len(numbers) - 1


def test_a_trace_stays_below_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epd_serve.telemetry.trace_file._MAX_BYTES", 1500)
    writer = TraceWriter(tmp_path, "e0")
    for number in range(100):
        writer.put(work("tower", "encode", number, number + 1))
    writer.close()
    assert writer.path.stat().st_size <= 1500
    assert read_traces(tmp_path).events


def test_a_full_disk_ends_the_trace_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = TraceWriter(tmp_path, "e0")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (writer.path.stat().st_size + 300, before[1]))
    try:
        for number in range(10):
            writer.put(work("tower", "encode", number, number + 1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    writer.close()
    assert caplog.text.count("the trace") == 1
    assert 1 <= len([event for event in read_traces(tmp_path).events if event["ph"] == "X"]) < 10


def test_the_command_joins_and_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def figures(*arguments: str) -> str:
        assert run_cli("trace", str(tmp_path / "traces"), *arguments) == 0
        return capsys.readouterr().out

    serve_one(tmp_path / "traces")
    output = tmp_path / "trace.json"
    table = figures("-o", str(output))
    assert "decode execute" in table and "10000.00" in table
    assert json.loads(output.read_bytes())["displayTimeUnit"] == "ms"
    found = json.loads(figures("--json"))
    assert found["num_requests"] == 1
    assert found["rows"]["stages"]["mean_ms"] == pytest.approx(17900)
