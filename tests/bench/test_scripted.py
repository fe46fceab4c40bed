"""Against a server whose delays and faults are known: every figure, and the right name for every fault."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from load_tester import Scripted, Scripts, session, settings
from scripted_server import FIRST_S, NUM_TOKENS, STALL_S

from epd_serve.bench.command import run_bench
from epd_serve.bench.connection import Connections, Target
from epd_serve.bench.outputs import Outputs
from epd_serve.bench.run_directory import RunDirectory
from epd_serve.bench.statistics import load_curve, percentile
from epd_serve.bench.types import Failure, Record

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
}
#: Of each figure against the server's own clock, which is this process's too.
LIMIT_S = 0.002


def measure(scripted: Scripted, path: Path, texts: tuple[str, ...]) -> tuple[list[Record], RunDirectory]:
    run, summary = session().begin(path, settings(scripted.url), Scripts(texts))
    assert summary is not None
    return run.records(), run


def test_figures_are_those_of_the_servers_own_clock(scripted: Scripted, tmp_path: Path) -> None:
    for number in range(5):  # where this process is held up, all that came meanwhile comes at once
        records, run = measure(scripted, tmp_path / f"run{number}", GOOD * 5)
        if (lag_s := run.segments()[0].loop_lag_max_s) < STALL_S / 2:
            break
    log = scripted.log()
    errors: dict[str, list[float]] = {}
    for record in records:
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
    run, summary = session().begin(tmp_path / "run", settings(scripted.url), Scripts(names))
    records = run.records()
    found = {name: record.failure for name, record in zip(names, records, strict=True)}
    assert found == {**BAD, "steady": None}
    details = {name: record.detail for name, record in zip(names, records, strict=True)}
    assert "the decode instance died" in details["in_stream_error"]
    assert "max_tokens is too large" in details["refused"]
    assert details["overloaded"] == "try later"
    assert {name: record.status for name, record in zip(names, records, strict=True)}["overloaded"] == 503
    assert summary is not None
    assert summary.total.num_failed == len(BAD)
    assert (summary.total.attainment.part, summary.total.attainment.whole) == (1, len(names))
    assert summary.total.failures["malformed"] == 3
    assert any("12 of 13 requests failed" in warning for warning in summary.warnings)
    # nothing was tried twice
    assert len([one for one in scripted.log().values() if one["id"] in {r.request_id for r in records}]) == 13


def test_an_answer_that_never_ends_is_given_up_at_the_time_limit(scripted: Scripted, tmp_path: Path) -> None:
    run, _ = session().begin(tmp_path / "run", settings(scripted.url, timeout_s=1.0), Scripts(("hang",)))
    (record,) = run.records()
    assert record.failure is Failure.TIMEOUT
    assert record.detail == "not finished within 1 s"
    assert record.finish_s - (record.sent_s or 0.0) > 0.9


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ValueError, match=r"connect.*is --base-url right"):
            session().begin(tmp_path / "run", settings(url), Scripts(("steady",)))
    assert not (tmp_path / "run").exists()


def test_waiting_for_a_slot_counts_from_the_schedule(scripted: Scripted, tmp_path: Path) -> None:
    """Two slots and four requests at once: the last two wait for a whole answer."""
    wanted = settings(scripted.url, rate=1000.0, max_concurrency=2)
    run, summary = session().begin(tmp_path / "run", wanted, Scripts(("steady",) * 4))
    records = run.records()
    assert summary is not None
    assert summary.total.max_concurrency == 2
    for early, late in ((records[0], records[2]), (records[1], records[3])):
        assert early.ttft_s is not None
        assert late.ttft_s is not None
        assert late.ttft_scheduled_s is not None
        assert late.ttft_s >= FIRST_S
        assert late.ttft_scheduled_s >= late.ttft_s + FIRST_S
        assert late.send_lag_s is not None
        assert late.send_lag_s >= FIRST_S
        assert 0 < late.slot_wait_s <= late.send_lag_s  # less by what the tester itself was late before
    assert any("2 requests waited for one of 2 client slots" in warning for warning in summary.warnings)


def test_a_closed_loop_keeps_its_number_of_requests_under_way(scripted: Scripted, tmp_path: Path) -> None:
    wanted = settings(scripted.url, arrivals="closed:3", rate=None)
    for number in range(5):  # where this process is held up, several have ended when it looks
        run, summary = session().begin(tmp_path / f"run{number}", wanted, Scripts(("steady",) * 12))
        assert summary is not None
        assert summary.total.max_concurrency == 3
        assert summary.total.planned_rate is None
        records = run.records()
        assert len(records) == 12
        last_s = max(record.sent_s or 0.0 for record in records)
        working = {count for at_s, count in load_curve(records) if (records[2].sent_s or 0.0) <= at_s <= last_s}
        if working <= {2, 3}:
            break
    assert working <= {2, 3}  # what ends is followed by the next before another ends


def test_a_name_with_several_addresses_is_reached_at_the_one_that_answers(scripted: Scripted) -> None:
    target = Target(scripted.url)
    target.addresses = ["127.0.0.2", "127.0.0.1"]  # as localhost is ::1 too, where the server is not

    async def ask() -> tuple[Failure | None, list[str]]:
        connections = Connections(target, timeout_s=5)
        answer = await connections.get("/v1/models")
        await connections.close()
        return answer.failure, target.addresses

    assert asyncio.run(ask()) == (None, ["127.0.0.1"])


def test_a_server_that_is_not_there_leaves_no_directory(tmp_path: Path) -> None:
    wanted = settings("http://127.0.0.1:9", workload="synthetic,requests=2")
    with pytest.raises(ValueError, match="is --base-url right"):
        run_bench(wanted, tmp_path, api_key=None, as_json=False, outputs=Outputs())
    assert not list(tmp_path.iterdir())
