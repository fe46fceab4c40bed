"""``epd-serve up`` in a process of its own, with fake instances and a fake gateway."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from program import read_until, wait_until

FAKE_PROGRAM = Path(__file__).parent / "fake_program.py"
PROGRAM = f"""
import os, sys
from epd_serve.launch.processes import forking
forking.can_fork = lambda config, devices: False
from epd_serve.launch import native
from epd_serve.launch.processes import supervisor
native.PROGRAM = (sys.executable, {str(FAKE_PROGRAM)!r})
if "GRACE_S" in os.environ:
    supervisor.GRACES_S.update(dict.fromkeys(supervisor.GRACES_S, float(os.environ["GRACE_S"])))
from epd_serve.cli import main
main()
"""
NAMES = {"e0", "p0", "d0", "gateway"}


@contextmanager
def up(
    fakes: Any, *arguments: str, stdout: int = subprocess.PIPE, **behaviours: str
) -> Iterator[subprocess.Popen[str]]:
    deployment = fakes.folder / "deployment.yaml"
    deployment.write_text("instances: {base_port: 0}\ngateway: {port: 0}\n")
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "up", str(deployment), *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "FAKE_DIR": str(fakes.folder),
            "TMPDIR": str(fakes.folder),
            "EPD_SERVE_LOG_DIR": str(fakes.folder / "logs"),
            **{f"FAKE_{name.upper()}": behaviour for name, behaviour in behaviours.items()},
        },
        # as a background job of a shell, which is stopped by SIGINT all the same
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(autouse=True)
def _hangups_count() -> Iterator[None]:
    """Whoever runs the tests may have SIGHUP ignored, and children inherit that."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ready_says_what_to_type_and_a_signal_stops_everything(fakes: Any, number: signal.Signals) -> None:
    with up(fakes, d0="loading") as process:
        text = read_until(process, "Chat: ")
        assert fakes.alive == NAMES
        assert re.search(r"e0 +starting \(E on cpu\)", text) and re.search(r"d0 +loading", text)
        assert "serves model 'demo' as E-P-D" in text
        process.send_signal(number)
        output, errors = process.communicate(timeout=300)
        assert (process.returncode, errors) == (0, "")
        assert "Stopping. Press Ctrl-C again" in output
    assert fakes.alive == set()
    [run] = (fakes.folder / "logs").iterdir()
    assert {file.name for file in run.iterdir()} == {"run.json", *(f"{name}.log" for name in NAMES)}


def test_detached_it_returns_once_it_is_ready_and_down_ends_it(fakes: Any) -> None:
    with up(fakes, "--detach") as process:
        output, errors = process.communicate(timeout=300)  # so nobody has its pipes any more
        assert (process.returncode, errors) == (0, "") and "'epd-serve down' stops it." in output
    assert fakes.alive == NAMES
    environment = {**os.environ, "EPD_SERVE_LOG_DIR": str(fakes.folder / "logs")}
    subprocess.run([sys.executable, "-m", "epd_serve.cli", "down"], env=environment, check=True, timeout=300)
    assert fakes.alive == set()
    [log] = fakes.folder.glob("logs/*/up.log")
    assert "Stopping." in log.read_text()


def test_detached_it_returns_with_the_code_of_what_failed(fakes: Any) -> None:
    with up(fakes, "--detach", p0="die") as process:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 1 and "p0 died" in output
    assert fakes.alive == set()


def test_it_runs_on_when_nobody_reads_its_news_and_its_terminal_ends(fakes: Any) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what nohup does; children inherit it
    reader, writer = os.pipe()
    os.close(reader)
    try:
        with up(fakes, stdout=writer) as process:
            os.close(writer)
            wait_until(lambda: fakes.alive == NAMES, "they run")
            process.send_signal(signal.SIGHUP)
            time.sleep(1)
            assert process.poll() is None and fakes.alive == NAMES
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=300) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert fakes.alive == set()


def test_a_second_signal_ends_deaf_processes_at_once(fakes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRACE_S", "300")
    with up(fakes, gateway="deaf", e0="deaf", p0="deaf") as process:
        read_until(process, "Chat: ")
        process.send_signal(signal.SIGINT)
        read_until(process, "Press Ctrl-C again")
        process.send_signal(signal.SIGTERM)  # as 'epd-serve down' does, which only waits
        time.sleep(1)
        assert {"gateway", "e0", "p0"} <= fakes.alive
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=300)
    assert fakes.alive == set()


def test_instances_that_are_not_ready_get_no_time_to_end(fakes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRACE_S", "300")
    with up(fakes, e0="stuck") as process:
        read_until(process, "e0       loading")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 0 and fakes.alive == set()


def test_a_death_after_ready_is_told_and_restarted(fakes: Any) -> None:
    with up(fakes) as process:
        read_until(process, "Chat: ")
        os.kill(fakes.pids["d0"], signal.SIGSEGV)
        assert "d0 died: killed by SIGSEGV. Restarting it in 1 s" in read_until(process, "its log is /")
        read_until(process, f"{'d0':<8} ready")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=300)
        assert process.returncode == 0
    assert list(fakes.folder.glob("logs/*/d0.log")), "the log of the death is lost"


def test_killing_the_supervisor_takes_its_processes_along(fakes: Any) -> None:
    with up(fakes, e0="deaf") as process:
        read_until(process, "Chat: ")
        assert fakes.alive == NAMES
        process.kill()
        process.wait()
        wait_until(lambda: not fakes.alive, "they have ended")
