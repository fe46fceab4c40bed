"""Each planted fault is found by its check, and a right server passes all of them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.verify.misbehaving_server import FAULTS
from benchmarks.verify.planted import client_of, results_of
from epd_serve.verify.check import CHECKS
from epd_serve.verify.client import Client
from epd_serve.verify.faults import admin_commands
from epd_serve.verify.runner import chosen, run_checks


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_planted_fault_is_found_by_its_check(fault: str) -> None:
    (result,) = await results_of(fault, [FAULTS[fault]])
    assert (result.outcome, bool(result.reason)) == ("fail", True), result
    assert result.curl.startswith("curl -sN http://127.0.0.1:")


def test_each_check_has_a_fault() -> None:
    untested = {name for name in CHECKS if name not in FAULTS.values()}
    assert {name.rpartition("-")[0] for name in untested} == {"faults.kill", "faults.stop", "faults.partition"}


async def test_a_right_server_gives_no_alarm_and_a_whole_report(tmp_path: Path) -> None:
    async with client_of() as client:
        report = await run_checks(client, chosen(()), tmp_path)
        assert [one for one in report.results if one.outcome in ("fail", "unjudged")] == []
        again = await run_checks(client, chosen(()), tmp_path, resume=True)
    skipped = {one.check.rpartition(".")[2] for one in report.results if one.outcome == "skipped"}
    assert {name.partition("-")[0] for name in skipped} == {"kill", "stop", "partition"}
    assert again.results == report.results  # nothing ran again: the seconds are the same
    assert json.loads((tmp_path / "verify.json").read_bytes())["model"] == "tiny"
    assert len(list(ElementTree.parse(tmp_path / "junit.xml").getroot())) == len(CHECKS)
    assert len(re.findall("<tr>", (tmp_path / "verify.html").read_text())) == len(CHECKS) + 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: chosen(["speed"]), "no suite speed"),
        (lambda: chosen([], ["api"]), "no check api, but --suite api"),
        (lambda: chosen([], ["api.none"]), "no check api.none"),
        (lambda: admin_commands(["kill-X=a"]), "should look like kill-E"),
        (lambda: admin_commands(["up:me"]), "should look like up:1234"),
    ],
)
def test_what_is_mistyped_is_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (0, "", r"nothing answers at http://127\.0\.0\.1:\d+ \(.*\); name a server that runs"),
        (404, "<p>\n not here", "/v1/models answered 404: <p> not here$"),
        (200, "<html>", "/v1/models lists no model; name one with --model, or another server"),
        (200, '{"data": []}', "/v1/models lists no model"),
        (200, "[]", "/v1/models lists no model"),
    ],
)
async def test_an_address_that_serves_no_model_is_named(status: int, body: str, message: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        if not status:
            server.close()
        with pytest.raises(ValueError, match=message):
            await client.meet()
        await client.close()


def test_pods_of_a_role_can_be_cut_off_and_let_back_in() -> None:
    commands = admin_commands(["kubectl:epd"])
    assert {name for name in commands if name.endswith("-E")} == {"kill-E", "partition-E", "heal-partition-E"}
    policy = json.loads(commands["partition-E"].partition("'")[2].partition("'")[0])
    assert policy["spec"]["podSelector"] == {"matchLabels": {"llm-d.ai/role": "encode"}}
    assert commands["heal-partition-E"] == f"kubectl -n epd delete networkpolicy {policy['metadata']['name']}"


async def test_recorded_answers_stand_for_the_reference(tmp_path: Path) -> None:
    record, names = tmp_path / "answers.json", ["answers.reference"]
    for fault, outcome in (("", "pass"), ("an unlike answer", "fail")):
        async with client_of(fault) as client:
            told = Client(
                client.target.url, reference=None if record.exists() else client.reference, record=record
            )
            (result,) = (await run_checks(told, chosen((), names), tmp_path)).results
            await told.close()
        assert result.outcome == outcome, result
