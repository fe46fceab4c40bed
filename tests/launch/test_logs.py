"""Runs, their logs, and ``epd-serve logs``."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from epd_serve.launch.processes import runs
from epd_serve.launch.processes.runs import Run, all_runs, running

COMMAND = [sys.executable, "-P", "-m", "epd_serve.cli", "logs"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EPD_SERVE_LOG_DIR", str(tmp_path / "logs"))
    return tmp_path / "logs"


def make(port: int = 8000, file: str | None = None, **logs: str) -> tuple[Run, int]:
    run, lock = Run.begin(f"127.0.0.1:{port}", None if file is None else Path(file))
    for process, text in logs.items():
        Path(run.logs, f"{process}.log").write_text(text)
    return run, lock


def ended(port: int = 8000, file: str | None = None, **logs: str) -> Run:
    run, lock = make(port, file, **logs)
    run.end(lock, keep_logs=True)
    return run


def show(*arguments: str) -> tuple[int, str]:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


def test_the_last_runs_stay_and_those_that_last(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "NUM_KEPT", 2)
    lasting, lock = make(p0="said")
    later = [ended() for _ in range(4)]
    last, last_lock = make()
    assert all_runs() == [last, later[3], later[2], lasting]
    assert running() == [last, lasting]
    logs, sockets = Path(lasting.logs), Path(lasting.sockets)
    assert logs.stat().st_mode & 0o777 == sockets.stat().st_mode & 0o777 == 0o700
    (sockets / "deployment.yaml").write_text("api_key: secret")
    lasting.end(lock, keep_logs=True)
    assert not sockets.exists() and (logs / "p0.log").read_text() == "said"
    last.end(last_lock, keep_logs=False)
    assert not Path(last.logs).exists() and running() == []


def test_a_run_lasts_as_soon_as_others_find_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, found = Path.write_bytes, list[bool]()

    def write_and_look(path: Path, data: bytes) -> int:
        count = write(path, data)
        found.extend(run.lasts for run in all_runs())
        return count

    monkeypatch.setattr(Path, "write_bytes", write_and_look)
    run, lock = make()
    run.end(lock, keep_logs=False)
    assert found == [True], "else another launcher would remove its sockets"


def test_two_may_look_at_an_ended_run_at_once(folder: Path) -> None:
    run = ended()
    looking = os.open(run.logs, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    assert not run.lasts
    os.close(looking)


def test_what_a_killed_launcher_left_is_removed_by_the_next(folder: Path) -> None:
    program = (
        "import os, signal\n"
        "from epd_serve.launch.processes.runs import Run\n"
        "run, lock = Run.begin('127.0.0.1:8000', None)\n"
        "print(run.sockets, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    left = Path(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip())
    assert left.is_dir() and running() == [] and len(all_runs()) == 1
    ended()
    assert not left.exists()


def test_the_logs_of_the_deployment_that_is_meant(folder: Path) -> None:
    code, said = show()
    assert code == 2 and str(folder) in said
    lines = "".join(f"line {number}\n" for number in range(30))
    ended(8001, "/files/b.yaml", p0="another\n")
    one, lock = make(8000, "/files/a.yaml", d0="crashed\n", p0=lines)
    ended(8002, p0="the last\n")
    code, text = show()
    assert code == 0 and f"==> {one.logs}/d0.log <==\ncrashed\n" in text, "of the one that runs"
    assert "line 10\n" in text and "line 9\n" not in text
    assert show("p0") == (0, lines)
    assert show("p0", "--deployment", "/files/b.yaml") == (0, "another\n")
    code, text = show("e0")
    assert code == 2 and "d0, p0" in text
    one.end(lock, keep_logs=True)
    assert show("p0") == (0, "the last\n")
    assert show("p0", "--deployment", "8000") == (0, lines)
    assert show("p0", "--deployment", "/files/c.yaml")[0] == 2
