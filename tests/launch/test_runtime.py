"""Where running deployments are found."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from epd_serve.cli.chat import _running
from epd_serve.launch.processes.runtime import (
    AddressTaken,
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


@contextmanager
def launcher(host: str, port: int) -> Iterator[RuntimeDirectory]:
    directory = RuntimeDirectory.make(host, port)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory.control))
        listener.listen()
        yield directory
    directory.remove()


def test_the_only_one_is_meant_and_of_several_the_one_of_the_port(root: Path) -> None:
    with pytest.raises(ValueError, match="start one with 'epd-serve up'"):
        find_deployment(None, 8000)
    with launcher("127.0.0.1", 8123) as first:
        assert find_deployment(None, 8000) == ("127.0.0.1:8123", first)
        with launcher("::1", 8000) as second:
            assert find_deployment(None, 8000) == ("::1:8000", second)
            assert find_deployment("8123", 8000) == find_deployment("127.0.0.1:8123", 1)
            with pytest.raises(ValueError, match=r"choose one with --deployment: 127\.0\.0\.1:8123, ::1:8000"):
                find_deployment(None, 9000)
            with pytest.raises(ValueError, match="no deployment of this user runs at 9000; those that run: 127"):
                find_deployment("9000", 8000)
            with pytest.raises(ValueError, match="choose one with --deployment"):
                find_deployment(None)
            file = root / "d.yaml"
            file.write_text("gateway: {port: 8123}")
            assert find_deployment(str(file)) == ("127.0.0.1:8123", first)
            file.unlink()


def test_a_chat_beside_several_lists_their_addresses(root: Path) -> None:
    wanted = r"--base-url: http://127\.0\.0\.1:8123, http://\[::1\]:8124"
    with launcher("127.0.0.1", 8123), launcher("::1", 8124), pytest.raises(ValueError, match=wanted):
        _running()


def test_one_that_was_killed_is_not_found_and_its_place_can_be_taken(root: Path) -> None:
    directory = RuntimeDirectory.make("127.0.0.1", 8000)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory.control))
        listener.listen()
    assert directory.control.exists() and running_deployments() == {}
    starting = RuntimeDirectory.make("127.0.0.1", 8002)
    assert not directory.path.exists(), "whichever address is asked for"
    with launcher("127.0.0.1", 8000) as control:
        assert starting.path.exists(), "it does not listen yet"
        assert running_deployments() == {"127.0.0.1:8000": control}
    assert running_deployments() == {}


def test_the_directory_of_one_that_runs_is_left_alone(root: Path) -> None:
    with launcher("127.0.0.1", 8000) as control:
        with pytest.raises(AddressTaken, match=r"127\.0\.0\.1 port 8000"):
            RuntimeDirectory.make("127.0.0.1", 8000)
        assert running_deployments() == {"127.0.0.1:8000": control}


def test_no_directory_that_others_can_enter(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.mkdir(mode=0o755)
    for refused in (lambda: RuntimeDirectory.make("127.0.0.1", 8000), running_deployments):
        with pytest.raises(ValueError, match="its owner alone can enter"):
            refused()
    monkeypatch.setenv("EPD_SERVE_RUNTIME_DIR", str(root / ("x" * 100)))
    with pytest.raises(ValueError, match="shorter directory"):
        RuntimeDirectory.make("127.0.0.1", 8000)


def test_the_suite_meets_no_deployment_of_its_user(monkeypatch: pytest.MonkeyPatch) -> None:
    here = runtime_root()
    monkeypatch.delenv("EPD_SERVE_RUNTIME_DIR")
    assert here != runtime_root()
