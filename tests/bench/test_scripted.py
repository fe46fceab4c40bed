"""Against a server whose delays and faults are known: every figure, and the right name for every fault."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from load_tester import Scripted, Scripts, session, settings
from scripted_server import FIRST_S, NUM_TOKENS, STALL_S

from epd_serve.bench.client import describe_server, open_session
from epd_serve.bench.run import Run
from epd_serve.bench.summary import percentile
from epd_serve.bench.types import Failure
from epd_serve.bench.workloads import load_workload

GOOD = ("steady", "stall", "early_role", "keep_alive_comments", "no_usage", "no_done")
BAD = {
    "no_finish_reason": Failure.NO_FINISH_REASON,
    "clean_end": Failure.CUT_STREAM,
    "cut": Failure.CUT_STREAM,
    "in_stream_error": Failure.IN_STREAM_ERROR,
    "error_then_done": Failure.IN_STREAM_ERROR,
    "no_tokens": Failure.NO_TOKENS,
    "malformed": Failure.MALFORMED,
    "no_stream": Failure.MALFORMED,
    "no_http": Failure.MALFORMED,
    "refused": Failure.HTTP_STATUS,
    "overloaded": Failure.HTTP_STATUS,
    "reset": Failure.CONNECTION_LOST,
    "hang": Failure.TIMEOUT,
}
#: Of each figure against the server's own clock, which is this process's too.
LIMIT_S = 0.002


def test_figures_are_those_of_the_servers_own_clock(scripted: Scripted, tmp_path: Path) -> None:
    for number in range(5):  # where this process is held up, all that came meanwhile comes at once
        run = session().run(tmp_path / f"run{number}", settings(scripted.url), Scripts(GOOD * 5))
        assert run.tester is not None
        if (lag_s := run.tester.loop_lag_max_s) < STALL_S / 2:
            break
    log = scripted.log()
    errors: dict[str, list[float]] = {}
    for record in run.records:
        truth = log[record.request_id]
        events = [at - truth["received"] for at in truth["events"]]
        tokens = events[truth["script"] == "early_role" :][:NUM_TOKENS]
        assert record.failure is None
        assert record.num_output_tokens == len(record.token_times_s) == NUM_TOKENS
        assert record.text == "".join(f" t{index}" for index in range(NUM_TOKENS))
        assert record.finish_reason == "length"
        assert record.has_usage == (truth["script"] not in ("no_usage", "no_done"))
        assert record.ttft_s is not None
        assert record.e2el_s is not None
        assert record.first_chunk_latency_s is not None
        assert record.tpot_s is not None
        found = {
            "ttft": record.ttft_s - tokens[0],
            "first_chunk": record.first_chunk_latency_s - events[0],
            "e2el": record.e2el_s - tokens[-1],
            "tpot": record.tpot_s - (tokens[-1] - tokens[0]) / (NUM_TOKENS - 1),
        }
        for name in ("ttft", "first_chunk", "e2el"):  # it was sent before it was there, and came after it left
            assert found[name] > -1e-5
        for name, error in found.items():
            errors.setdefault(name, []).append(error)
        gaps = zip(record.itl_s, tokens[1:], tokens, strict=False)
        errors.setdefault("itl", []).extend(gap - (after - before) for gap, after, before in gaps)
        if truth["script"] == "stall":
            assert max(record.itl_s) > STALL_S / 2
        if truth["script"] == "early_role":
            assert record.ttft_s - record.first_chunk_latency_s > FIRST_S / 2
    # Where the machine holds the tester up, its times are as wrong as it says itself.
    limit_s = max(LIMIT_S, lag_s)
    worst = {name: percentile(sorted(map(abs, some)), 50) for name, some in errors.items()}
    assert {name: error for name, error in worst.items() if error > limit_s} == {}


def test_each_misbehaviour_has_its_name_and_counts_against_the_server(scripted: Scripted, tmp_path: Path) -> None:
    names = (*BAD, "steady")
    run = session().run(tmp_path / "run", settings(scripted.url, timeout_s=2.0), Scripts(names))
    records, summary = run.records, run.summary
    found = {name: record.failure for name, record in zip(names, records, strict=True)}
    assert found == {**BAD, "steady": None}
    details = {name: record.detail for name, record in zip(names, records, strict=True)}
    assert "the decode instance died" in details["in_stream_error"]
    assert "max_tokens is too large" in details["refused"]
    assert details["overloaded"] == "try later" and details["hang"] == "not finished within 2 s"
    assert {name: record.status for name, record in zip(names, records, strict=True)}["overloaded"] == 503
    assert summary.total.num_failed == len(BAD)
    assert (summary.total.attainment.part, summary.total.attainment.whole) == (1, len(names))
    assert summary.total.failures["malformed"] == 3
    assert any("13 of 14 requests failed" in warning for warning in summary.warnings)
    assert not any(record.slot_wait_s for record in records)  # without a limit there are no slots
    # nothing was tried twice
    assert len([one for one in scripted.log().values() if one["id"] in {r.request_id for r in records}]) == 14


def test_an_unreachable_server_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ValueError, match="is --base-url right"):
            session().run(tmp_path / "run", settings(url), Scripts(("steady",)))
    assert not (tmp_path / "run").exists()


def test_waiting_for_a_slot_counts_from_the_schedule(scripted: Scripted, tmp_path: Path) -> None:
    """Two slots and four requests at once: the last two wait for a whole answer."""
    wanted = settings(scripted.url, rate=1000.0, max_concurrency=2)
    run = session().run(tmp_path / "run", wanted, Scripts(("steady",) * 4))
    records, summary = run.records, run.summary
    assert summary.total.max_concurrency == 2
    for early, late in ((records[0], records[2]), (records[1], records[3])):
        assert early.ttft_s is not None
        assert late.ttft_s is not None
        assert late.ttft_scheduled_s is not None
        assert late.ttft_s >= FIRST_S
        assert late.ttft_scheduled_s >= late.ttft_s + FIRST_S
        assert late.send_lag_s is not None
        assert late.send_lag_s >= FIRST_S
        assert late.slot_wait_s >= FIRST_S
    assert any("2 requests waited for one of 2 client slots" in warning for warning in summary.warnings)


def test_a_later_turn_carries_the_servers_own_answers(scripted: Scripted, tmp_path: Path) -> None:
    file = tmp_path / "w.jsonl"
    file.write_text('{"turns": ["steady one", "steady two", "refused"]}\n{"turns": ["refused", "steady"]}\n')
    run = session().run(tmp_path / "run", settings(scripted.url), load_workload(f"custom:{file}"))
    records = run.records
    assert [one.failure for one in records[:3]] == [None, None, Failure.HTTP_STATUS]
    assert [one.failure for one in records[3:]] == [Failure.HTTP_STATUS, Failure.NOT_SENT]
    assert (records[1].sent_s or 0.0) >= records[0].finish_s
    sent = scripted.log()[records[2].request_id]["messages"]
    assert [one["role"] for one in sent] == ["user", "assistant"] * 2 + ["user"]
    assert sent[1]["content"] == records[0].text
    assert run.total.planned_rate is None
    assert Run.read(tmp_path / "run").records == records


def test_ctrl_c_waits_for_open_requests(scripted: Scripted, tmp_path: Path) -> None:
    """Four users; the last request of each is held until the tester has said that it stops."""
    file = tmp_path / "w.jsonl"
    file.write_text('{"prompt": "hold stopped"}\n' * 8)
    command = [sys.executable, "-m", "epd_serve.cli", "bench", "--base-url", scripted.url, "--warmups", "0"]
    command += ["--workload", f"custom:{file}", "--arrivals", "closed:4", "--work-dir", str(tmp_path / "runs")]
    before = len(scripted.log())
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as tester:
        while len(scripted.log()) < before + 4:
            assert tester.poll() is None
        tester.send_signal(signal.SIGINT)
        assert tester.stdout is not None
        assert any("requests are open" in line for line in tester.stdout)
        scripted.release("stopped")
        output, _ = tester.communicate(timeout=300)
    assert tester.returncode == 130, output
    (path,) = (tmp_path / "runs").glob("*/run")
    run = Run.read(path)
    assert len(run.records) == 4 and not run.is_complete
    assert any("not complete: 4 of 8" in warning for warning in run.summary.warnings)


@pytest.mark.parametrize(("key", "status"), [("sk-wrong", 401), (None, 401)])
async def test_a_key_that_is_missing_or_wrong_is_named(key: str | None, status: int) -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no such key"}}, status=status)

    app = web.Application()
    app.router.add_get("/v1/models", refuse)
    async with TestServer(app) as served, open_session(str(served.make_url("/")), key) as http:
        with pytest.raises(ValueError, match=r"HTTP 401: no such key.*export OPENAI_API_KEY=KEY"):
            await describe_server(http, settings(str(served.make_url("")).rstrip("/")))
