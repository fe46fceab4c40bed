"""Where running deployments are found."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from epd_serve.cli.app import app
from epd_serve.cli.chat import _running
from epd_serve.launch.processes.runtime import (
    AddressTaken,
    Run,
    RuntimeDirectory,
    find_deployment,
    running_deployments,
    runtime_root,
)


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Short, as the path of a socket must be."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        root = Path(folder) / "r"
        monkeypatch.setenv("EPD_SERVE_RUNTIME_DIR", str(root))
        yield root


def run_at(address: str, file: Path | None = None) -> Run:
    return Run(address=address, log_dir="/logs", file=None if file is None else str(file))


@contextmanager
def launcher(address: str, file: Path | None = None) -> Iterator[RuntimeDirectory]:
    directory = RuntimeDirectory.make(run_at(address, file))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory.control))
        listener.listen()
        yield directory
    directory.remove()


def test_the_only_one_is_meant_and_of_several_the_one_of_the_port(root: Path) -> None:
    with pytest.raises(ValueError, match="start one with 'epd-serve up'"):
        find_deployment(None, 8000)
    with launcher("127.0.0.1:8123") as first:
        assert find_deployment(None, 8000) == ("127.0.0.1:8123", first)
        with launcher("::1:8000") as second:
            assert find_deployment(None, 8000) == ("::1:8000", second)
            assert find_deployment("8123", 8000) == find_deployment("127.0.0.1:8123", 1)
            with pytest.raises(ValueError, match=r"choose one by address or port: 127\.0\.0\.1:8123, ::1:8000"):
                find_deployment(None, 9000)
            with pytest.raises(ValueError, match="no deployment of this user is called 9000; those that run: 127"):
                find_deployment("9000", 8000)
            with pytest.raises(ValueError, match="choose one by address or port"):
                find_deployment(None)


def test_a_file_means_the_deployment_that_was_started_from_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever port another file names."""
    mine, other = root / "mine.yaml", root / "other.yaml"
    with launcher("127.0.0.1:8000", mine) as first, launcher("127.0.0.1:8001", root / "third.yaml"):
        assert find_deployment(str(mine)) == ("127.0.0.1:8000", first)
        monkeypatch.chdir(root)
        assert find_deployment("mine.yaml") == ("127.0.0.1:8000", first)
        with pytest.raises(ValueError, match=r"is called .*other\.yaml; .*:8000 \(mine\.yaml\)"):
            find_deployment(str(other))


def test_a_chat_beside_several_lists_their_addresses(root: Path) -> None:
    wanted = r"--base-url: http://127\.0\.0\.1:8123, http://\[::1\]:8124"
    with launcher("127.0.0.1:8123"), launcher("::1:8124"), pytest.raises(ValueError, match=wanted):
        _running()


def test_one_that_was_killed_is_not_found_and_its_place_can_be_taken(root: Path) -> None:
    directory = RuntimeDirectory.make(run_at("127.0.0.1:8000"))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory.control))
        listener.listen()
    assert directory.control.exists() and running_deployments() == {}
    starting = RuntimeDirectory.make(run_at("127.0.0.1:8002"))
    assert not directory.path.exists(), "whichever address is asked for"
    with launcher("127.0.0.1:8000") as control:
        assert starting.path.exists(), "it does not listen yet"
        assert running_deployments() == {"127.0.0.1:8000": control}
    assert running_deployments() == {}


def test_the_directory_of_one_that_runs_is_left_alone(root: Path) -> None:
    with launcher("127.0.0.1:8000") as control:
        with pytest.raises(AddressTaken, match=r"address 127\.0\.0\.1:8000"):
            RuntimeDirectory.make(run_at("127.0.0.1:8000"))
        assert running_deployments() == {"127.0.0.1:8000": control}


def test_no_directory_that_others_can_enter(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.mkdir(mode=0o755)
    for refused in (lambda: RuntimeDirectory.make(run_at("127.0.0.1:8000")), running_deployments):
        with pytest.raises(ValueError, match="its owner alone can enter"):
            refused()
    monkeypatch.setenv("EPD_SERVE_RUNTIME_DIR", str(root / ("x" * 100)))
    with pytest.raises(ValueError, match="shorter directory"):
        RuntimeDirectory.make(run_at("127.0.0.1:8000"))


#: A launcher, which takes a while to end.
LAUNCHER = """
import signal, socket, sys, time
from epd_serve.launch.processes.runtime import Run, RuntimeDirectory
directory = RuntimeDirectory.make(Run(address=sys.argv[1], log_dir="/logs", file=sys.argv[2]))
listener = socket.socket(socket.AF_UNIX)
listener.bind(str(directory.control))
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.2), directory.remove(), sys.exit()))
listener.listen()
print("listens", flush=True)
signal.pause()
"""


def test_down_ends_the_deployment_of_a_file_and_no_other(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/tmp")
    command = [sys.executable, "-c", LAUNCHER, "127.0.0.1:8000", "/tmp/mine.yaml"]
    with launcher("127.0.0.1:8001", Path("/tmp/other.yaml")) as other:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as mine:
            assert mine.stdout is not None and mine.stdout.readline() == "listens\n"
            refused = CliRunner().invoke(app, ["down", "unknown.yaml"])
            assert isinstance(refused.exception, ValueError) and mine.poll() is None
            done = CliRunner().invoke(app, ["down", "mine.yaml"])
            assert (done.exit_code, mine.wait(10)) == (0, 0), done.output
        assert "127.0.0.1:8000 (mine.yaml)" in done.stdout and "Stopped after" in done.stdout
        assert running_deployments() == {"127.0.0.1:8001": other}


def test_the_suite_meets_no_deployment_of_its_user(monkeypatch: pytest.MonkeyPatch) -> None:
    here = runtime_root()
    monkeypatch.delenv("EPD_SERVE_RUNTIME_DIR")
    assert here != runtime_root()
