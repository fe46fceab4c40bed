"""The chaos benchmark in small: every answer right or a clear error, nothing hangs, nothing leaks."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transports import needs_mooncake

from benchmarks import chaos
from epd_serve.launch.processes.process import ProcessState
from epd_serve.verify.client import Client

NUM_REQUESTS = 18


async def test_what_is_dead_and_not_yet_known_to_be_is_not_killed_again() -> None:
    """It would count twice, and is started again once."""
    client = Client("http://127.0.0.1:1")
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:  # noqa: ASYNC220
        dead: Any = SimpleNamespace(pid=process.pid, state=ProcessState.READY, spec=SimpleNamespace(name="e0"))
        deployment: Any = SimpleNamespace(processes=[dead])
        own = chaos.Chaos(deployment, client, interval_s=0.001)
        killing = asyncio.create_task(own.kill())
        while not own.kills:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)
    await client.close()
    assert own.kills == {"e0": 1}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("store", ["embedded", pytest.param("mooncake", marks=[needs_mooncake, pytest.mark.slow])])
def test_no_answer_is_wrong_while_everything_dies(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "chaos.json"
    options = ["--requests", str(NUM_REQUESTS), "--seed", "1", "--concurrency", "6"]
    options += ["--store", store, "--transport", "mooncake" if store == "mooncake" else "auto"]
    monkeypatch.setattr(chaos, "DEADLINE_S", 300.0)  # an answer may take long, and has to come
    for interval_s in (2, 8, 24):  # where what dies takes that long to start again, hardly any request is answered
        more = ["--interval", str(interval_s), "--output", str(output)]
        monkeypatch.setattr(sys, "argv", ["chaos", *options, *more])
        code = chaos.main()
        report = json.loads(output.read_text())
        assert code == 0, json.dumps(report, indent=2)
        outcomes = report["outcomes"]
        assert sum(outcomes.values()) == report["requests"] >= NUM_REQUESTS
        assert outcomes["wrong"] == outcomes["hang"] == 0
        assert report["leaks"] == {}
        if outcomes["identical"] > report["requests"] // 10:
            break
    killed = {name.rstrip("0123456789") for name in report["kills"]}
    assert killed == {"e", "p", "d"} | ({"master"} if store == "mooncake" else set())
    assert sum(report["kills"].values()) == sum(report["restarts"].values()) > 0
    assert outcomes["identical"] > report["requests"] // 10


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stop_s", [0.0, 8.0], ids=["replaced", "back"])
def test_no_stream_is_lost_while_the_only_d_is_stopped(
    stop_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "stop.json"
    options = ["--requests", "6", "--concurrency", "6", "--interval", "1", "--topology", "P-D"]
    hang_timeout_s = 30.0 if stop_s else 4.0
    options += ["--stop", str(stop_s), "--hang-timeout", str(hang_timeout_s), "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["chaos", *options])
    code = chaos.main()
    report = json.loads(output.read_text())
    assert code == 0, json.dumps(report, indent=2)
    assert report["outcomes"]["identical"] == 6


@pytest.mark.slow
def test_streams_go_on_while_every_role_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "kills.json"
    options = ["--requests", "40", "--interval", "1.5", "--concurrency", "8", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["chaos", "--streams", *options])
    monkeypatch.setattr(chaos, "DEADLINE_S", 300.0)  # an answer may take long, and has to come
    for _ in range(3):  # a kill may hit an instance that has no stream at the moment
        code = chaos.main()
        report = json.loads(output.read_text())
        assert code == 0 and report["passed"], json.dumps(report, indent=2)
        assert {name.rstrip("0123456789") for name in report["kills"]} == {"e", "p", "d"}
        if report["continuations"]:
            break
    assert report["continuations"] > 0
