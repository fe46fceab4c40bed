"""A planted fault of each suite is found by its check, and a right server passes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestServer
from fleet import deployed
from misbehaving_server import FAULTS, PASSED, Server

from epd_serve.verify.check import CHECKS, SUITES
from epd_serve.verify.client import Client
from epd_serve.verify.faults import admin_commands
from epd_serve.verify.runner import chosen, run_checks


@asynccontextmanager
async def client_of(fault: str = "") -> AsyncIterator[Client]:
    async with TestServer(Server(fault).app()) as tested, TestServer(Server().app()) as right:
        command = f"curl -sS --fail -X POST {tested.make_url('/admin/kill')}"  # it must come while streams run
        client = Client(
            str(tested.make_url("")),
            reference=Client(str(right.make_url(""))),
            slowness=1 / 15,  # it answers in milliseconds
            admin={"kill-D": command},
        )
        try:
            yield client
        finally:
            await client.close()


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_planted_fault_is_found_by_its_check(fault: str, tmp_path: Path) -> None:
    async with client_of(fault) as client:
        (result,) = (await run_checks(client, chosen((), [FAULTS[fault]]), tmp_path)).results
    assert (result.outcome, bool(result.reason)) == ("fail", True), result
    assert result.curl.startswith("curl -sN http://127.0.0.1:")


def test_each_suite_has_a_planted_fault() -> None:
    assert {name.partition(".")[0] for name in FAULTS.values()} == set(SUITES)


async def test_a_right_server_gives_no_alarm_and_a_whole_report(tmp_path: Path) -> None:
    async with client_of() as client:
        report = await run_checks(client, chosen((), PASSED), tmp_path)
    assert [one for one in report.results if one.outcome != "pass"] == []
    assert json.loads((tmp_path / "verify.json").read_bytes())["model"] == "tiny"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: chosen(["speed"]), "no suite speed"),
        (lambda: chosen([], ["api"]), "no check api; did you mean --suite api"),
        (lambda: chosen([], ["api.none"]), "no check api.none"),
        (lambda: admin_commands(["kill-X=a"]), "should look like kill-E"),
        (lambda: admin_commands(["up:me"]), "should look like up:1234"),
    ],
)
def test_a_typing_error_is_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


async def test_faults_find_the_processes_of_a_deployment() -> None:
    async with deployed("E-P-D") as deployment:
        commands = admin_commands([f"up:{os.getpid()}"])
        for part in "EPD":
            shown = commands[f"kill-{part}"].replace("kill -KILL", "echo")
            found = await asyncio.to_thread(subprocess.run, ["sh"], input=shown, capture_output=True, text=True)
            assert found.stdout.strip() == str(deployment.instances[f"{part.lower()}0"].pid)


def test_all_checks_are_chosen_by_default() -> None:
    assert {one.name for one in chosen(())} == set(CHECKS)


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (0, "", r"no answer from http://127\.0\.0\.1:\d+/v1/models: .*is --base-url right"),
        (404, "<p>\n not here", "/v1/models: status 404: <p>"),
        (200, "<html>", "/v1/models: status 200: <html>; is --base-url right"),
        (200, '{"data": []}', "/v1/models lists no model; name one with --model, or another server"),
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


async def test_recorded_answers_stand_for_the_reference(tmp_path: Path) -> None:
    record, names = tmp_path / "answers.json", ["answers.reference"]
    async with client_of() as client:
        recording = Client(client.url, reference=client.reference, record=record)
        assert (await run_checks(recording, chosen((), names), tmp_path)).results[0].outcome == "pass"
        await recording.close()
    record.write_text(record.read_text().replace("red", "blue"))
    async with client_of() as client:
        reading = Client(client.url, record=record)
        assert (await run_checks(reading, chosen((), names), tmp_path)).results[0].outcome == "fail"
        await reading.close()
