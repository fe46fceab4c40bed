"""``epd-serve status`` and ``switch``: which gateway they ask, and what they say where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from answering import answering
from program import run_cli

from epd_serve.launch.processes.runs import Run

LOAD = {"num_waiting": 2, "num_waiting_encodes": 1}
BUDGETS = {"max_num_seqs": 64.0, "max_num_batched_tokens": 2048.0, "feature_cache_bytes": 2.0**28}
IDLE: dict[str, Any] = {"ready": True, "in_flight": {}, "device": "cpu", "load": None, "budgets": BUDGETS}
IDLE |= {"pid": 71, "restarts": 2, "memory_bytes": 3 << 29}
GONE = {"role": None, "ready": False, "device": None, "budgets": {}, "pid": None, "memory_bytes": None}
INSTANCES = [
    {**IDLE, "name": "e0", "role": "E", "in_flight": {"E": 1}, "load": LOAD},
    {**IDLE, "name": "p0", **GONE},
    {**IDLE, "name": "d1", "role": "D"},
]
ANSWERS: dict[str, Any] = {
    "/instances": {"topology": "E-P-D", "models": ["tiny"], "engine": "vllm", "instances": INSTANCES},
    "/requests": {"running": 3, "waiting": 4},
    "/instances/e0/role": {"from": "E", "to": "D", "seconds": 0.25, "drain_s": 0.125},
}


def answer(path: str, body: bytes) -> tuple[int, bytes]:
    """As an admin API that knows these paths."""
    if found := ANSWERS.get(path):
        return 200, msgspec.json.encode(found)
    if path.startswith("/locked"):
        return 401, b'{"error": {"message": "wrong key", "code": "invalid_api_key"}}'
    if path.startswith("/text"):
        return 200, b"hello"
    return 404, b'{"error": {"message": "no route", "code": null}}'


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EPD_SERVE_LOG_DIR", str(tmp_path / "logs"))
    return tmp_path


@pytest.fixture
def deployment(root: Path) -> Iterator[Run]:
    """One that runs, with the socket of its gateway."""
    run, lock = Run.begin("127.0.0.1:8123", None)
    with answering(answer, run.admin):
        yield run
    run.end(lock, keep_logs=False)


@pytest.fixture
def url() -> Iterator[str]:
    with answering(answer) as url:
        yield url


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """All that it says; an error behind "epd-serve: "."""
    code = run_cli(*arguments)
    said = capsys.readouterr()
    assert (code == 0) is (said.err == ""), said.err
    return said.out + said.err


TABLE = """\
127.0.0.1:8123: tiny as E-P-D, engine vllm; 3 requests running, 4 waiting
name  role  state      device  pid  restarts  memory  in flight  waiting
e0    E     ready      cpu     71   2         1.5GiB  1          3
p0    ?     not ready  ?       ?    2         ?       0          0
d1    D     ready      cpu     71   2         1.5GiB  0          0
at most 256MiB of features: e0
at most 64 sequences, 2048 tokens: d1
"""


def test_the_deployment_of_this_machine_needs_no_port(deployment: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "status") == run(capsys, "status", "--deployment", "8123") == TABLE
    shown = msgspec.json.decode(run(capsys, "status", "-o", "json"))
    assert shown == {"deployment": "127.0.0.1:8123", **ANSWERS["/instances"], "requests": ANSWERS["/requests"]}
    assert run(capsys, "switch", "e0", "D").startswith("e0: E → D in 0.250 s")
    said = run(capsys, "status", "--deployment", "9000")
    assert said == "epd-serve: no running deployment of this user is called 9000; running: 127.0.0.1:8123\n"


def test_a_switch_of_the_last_encoder_says_that_p_encodes(
    deployment: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "No instance" not in run(capsys, "switch", "e0", "D")  # another one still encodes
    rest = {**ANSWERS["/instances"], "instances": [{**one, "role": "D"} for one in INSTANCES]}
    monkeypatch.setitem(ANSWERS, "/instances", rest)
    assert "No instance has the stage E now: P encodes media itself." in run(capsys, "switch", "e0", "D")


@pytest.mark.parametrize("command", [("bench", "--num-requests", "1"), ("verify",), ("chat",)])
def test_clients_send_to_the_deployment_of_this_machine(
    command: tuple[str, ...], deployment: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "http://127.0.0.1:8123" in run(capsys, *command)  # where none answers
    other, lock = Run.begin("127.0.0.1:8124", None)
    assert "several deployments are running; name one with --deployment" in run(capsys, *command)
    assert "http://127.0.0.1:8124" in run(capsys, *command, "--deployment", "8124")
    other.end(lock, keep_logs=False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "epd-serve up"),
        (("--admin", "127.0.0.1:8001"), "--admin http://127.0.0.1:8001"),
        (("--admin", "URL/text"), "gateway.admin.port"),
        (("--admin", "URL/locked"), "EPD_SERVE_ADMIN_KEY"),
        (("--admin", "http://127.0.0.1:1"), "http://127.0.0.1:1 does not answer"),
        (("--admin", "URL", "--deployment", "8000"), "use one of them"),
    ],
)
def test_what_is_wrong_is_said_with_what_would_be_right(
    arguments: tuple[str, ...], said: str, url: str, root: Path, capsys: Any
) -> None:
    text = run(capsys, "status", *(argument.replace("URL", url) for argument in arguments))
    assert said in text and text.startswith("epd-serve: ") and text.count("\n") == 1
