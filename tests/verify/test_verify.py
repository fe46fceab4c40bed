"""Each planted fault is found by its check, and a right server passes all of them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from aiohttp.test_utils import TestServer

from epd_serve.verify.books import balanced
from epd_serve.verify.check import SUITES
from epd_serve.verify.client import Client
from epd_serve.verify.faults import admin_commands
from epd_serve.verify.runner import chosen, run_checks

_spec = spec_from_file_location("misbehaving_server", Path(__file__).with_name("misbehaving_server.py"))
assert _spec is not None and _spec.loader is not None
misbehaving_server = module_from_spec(_spec)
sys.modules[_spec.name] = misbehaving_server
_spec.loader.exec_module(misbehaving_server)
Server, FAULTS = misbehaving_server.Server, misbehaving_server.FAULTS


@asynccontextmanager
async def client_of(fault: str = "") -> AsyncIterator[Client]:
    async with TestServer(Server(fault).app()) as tested, TestServer(Server().app()) as right:
        reference = Client(str(right.make_url("")))
        client = Client(str(tested.make_url("")), reference=reference, scale=0.2)
        try:
            yield client
        finally:
            await client.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balanced, "__defaults__", (0.5,))


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_planted_fault_is_found_by_its_check(fault: str, tmp_path: Path, quick: None) -> None:
    async with client_of(fault) as client:
        report = await run_checks(client, chosen((), (FAULTS[fault],)), tmp_path)
    (result,) = report.results
    assert (result.outcome, bool(result.reason)) == ("fail", True), result
    assert result.curl.startswith("curl -sN http://127.0.0.1:")


async def test_a_right_server_gives_no_alarm_and_a_whole_report(tmp_path: Path) -> None:
    checks = chosen([suite for suite in SUITES if suite != "faults"])
    async with client_of() as client:
        report = await run_checks(client, checks, tmp_path)
        assert [one for one in report.results if one.outcome != "pass" and one.check != "media.slow_server"] == []
        again = await run_checks(client, checks, tmp_path, resume=True)
    assert again.results == report.results  # nothing ran again: the seconds are the same
    assert json.loads((tmp_path / "verify.json").read_bytes())["model"] == "tiny"
    assert len(list(ElementTree.parse(tmp_path / "junit.xml").getroot())) == len(checks)
    assert len(re.findall("<tr>", (tmp_path / "verify.html").read_text())) == len(checks) + 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: chosen(["speed"]), "no suite speed"),
        (lambda: chosen([], ["api.none"]), "no check api.none"),
        (lambda: admin_commands(["kill-X=a"]), "should look like kill-E"),
        (lambda: admin_commands(["up:me"]), "should look like up:1234"),
    ],
)
def test_what_is_mistyped_is_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
