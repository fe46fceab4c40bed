"""The logs of runs stay, and ``epd-serve logs`` shows them."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from program import read_until

from epd_serve.launch.processes import logs
from epd_serve.launch.processes.runtime import Run, RuntimeDirectory

COMMAND = [sys.executable, "-P", "-m", "epd_serve.cli", "logs"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EPD_SERVE_LOG_DIR", str(tmp_path / "logs"))
    monkeypatch.setenv("EPD_SERVE_RUNTIME_DIR", str(tmp_path / "none"))
    return tmp_path / "logs"


def make(folder: Path, name: str, **logs: str) -> Path:
    directory = folder / name
    directory.mkdir(parents=True)
    for process, text in logs.items():
        (directory / f"{process}.log").write_text(text)
    return directory


def show(*arguments: str) -> tuple[int, str]:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


def test_the_last_runs_stay_with_their_logs_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "NUM_LOGS_KEPT", 2)
    for number in range(3):
        make(folder, f"20260101-00000{number}-1", p0="old")
    with logs.new_log_run() as directory:
        assert directory is not None
        assert [one.name for one in logs.log_runs()] == [directory.name, "20260101-000002-1"]
        (directory / "p0.log").write_text("said")
        (directory / "gateway.yaml").write_text("api_key: secret")
        (directory / "roles").mkdir()
        make(folder, "20990101-000000-1"), make(folder, "20990101-000001-1")
        with logs.new_log_run():
            assert directory.is_dir(), "it still runs"
    assert [file.name for file in directory.iterdir()] == ["p0.log"]
    assert directory.stat().st_mode & 0o777 == 0o700


def test_a_run_that_said_nothing_leaves_nothing(folder: Path) -> None:
    with logs.new_log_run() as directory:
        assert directory is not None
    assert list(folder.iterdir()) == []


def test_without_a_place_for_logs_it_runs_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EPD_SERVE_LOG_DIR", str(tmp_path / "file" / "logs"))
    with logs.new_log_run() as directory:
        assert directory is None


def test_on_a_full_disk_it_runs_all_the_same(folder: Path) -> None:
    """A limit on the size of files fails a write as a full disk does, and lets directories be made."""
    program = (
        "import resource\n"
        "from epd_serve.launch.processes.logs import new_log_run\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))\n"
        "with new_log_run() as directory:\n"
        "    print(directory)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "None\n"
    assert list(folder.iterdir()) == []


def test_what_is_shown(folder: Path) -> None:
    assert show() == (2, f"epd-serve: {folder} has the logs of 0 runs; 'epd-serve up' writes them\n")
    make(folder, "20260101-000000-1", d0="before\n")
    lines = "".join(f"line {number}\n" for number in range(30))
    latest = make(folder, "20260102-000000-1", d0="crashed\n", p0=lines)
    code, text = show()
    assert code == 0
    assert f"==> {latest}/d0.log <==\ncrashed\n" in text and "line 10\n" in text and "line 9\n" not in text
    assert show("p0") == (0, lines)
    assert show("d0", "--run", "2") == (0, "before\n")
    code, text = show("e0")
    assert (code, text) == (2, f"epd-serve: {latest} has no log of 'e0'; it has those of d0, p0\n")
    assert [line.split()[0] for line in show("--list")[1].splitlines()] == ["1", "2"]


def test_following_shows_whole_lines_as_they_come(folder: Path) -> None:
    latest = make(folder, "20260102-000000-1", p0="first\n")
    process = subprocess.Popen([*COMMAND, "p0", "-f"], stdout=subprocess.PIPE, text=True)
    try:
        read_until(process, "first")
        with (latest / "p0.log").open("a") as log:
            log.write("second\nthi")
            log.flush()
            read_until(process, "second")
            log.write("rd\n")
        assert read_until(process, "third").endswith("third\n")
    finally:
        process.kill()
        process.communicate()


def test_the_logs_of_the_deployment_that_is_meant(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of another one that was started later."""
    runs = {}
    for number, (port, file) in enumerate(((8000, "a"), (8000, "a"), (8001, "b"))):
        directory = make(folder, f"2026010{number + 1}-000000-1", p0=f"run {number}\n")
        runs[number] = Run(address=f"127.0.0.1:{port}", log_dir=str(directory), file=f"/files/{file}.yaml")
        runs[number].write(directory)
    assert show("p0") == (0, "run 2\n")
    assert show("p0", "--deployment", "8000") == (0, "run 1\n")
    assert show("p0", "--deployment", "/files/a.yaml", "--run", "2") == (0, "run 0\n")
    assert show("p0", "--deployment", "/files/c.yaml")[0] == 2
    with tempfile.TemporaryDirectory(dir="/tmp") as root, socket.socket(socket.AF_UNIX) as listener:
        monkeypatch.setenv("EPD_SERVE_RUNTIME_DIR", f"{root}/r")
        listener.bind(str(RuntimeDirectory.make(runs[1]).control))
        listener.listen()
        assert show("p0") == (0, "run 1\n"), "the one that runs"
        assert show("p0", "--run", "2") == (0, "run 0\n")
        assert show("p0", "--deployment", "/files/b.yaml") == (0, "run 2\n")
