"""The logs of this user's deployments: a directory for each run, and in it a file for each process."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from epd_serve.launch.processes.runtime import RUN_FILE

TAIL_LINES = 20
#: Read at once.
_MOST_BYTES = 1 << 20


def read_log(file: Path, after: int | None) -> tuple[str, int]:
    """The whole lines from the byte ``after`` on, at most 1 MiB of them, and the byte behind them.

    ``after`` None: the last lines. Raises OSError.
    """
    with file.open("rb") as stream:
        size = stream.seek(0, 2)
        begin = max(0, size - _MOST_BYTES) if after is None else after
        stream.seek(begin)
        data = stream.read(_MOST_BYTES)
    # A line that is being written comes with the next piece, unless it is longer than any.
    whole = data[: data.rfind(b"\n") + 1] or (data if len(data) == _MOST_BYTES else b"")
    lines = whole.decode("utf-8", "replace")
    if after is None:
        lines = "".join(lines.splitlines(keepends=True)[-TAIL_LINES:])
    return lines, begin + len(whole)


def log_files(directory: Path) -> dict[str, Path]:
    """The logs of a run by the names of their processes."""
    return {file.stem: file for file in sorted(directory.glob("*.log"))}


#: Runs whose logs are kept.
NUM_LOGS_KEPT = 10
#: What a run writes beside its logs, in round numbers. A full disk makes directories all the same.
_LOG_ROOM_BYTES = 256 << 10


def log_root() -> Path:
    """``EPD_SERVE_LOG_DIR``, or a directory in that for the user's state."""
    if own := os.environ.get("EPD_SERVE_LOG_DIR"):
        return Path(own).expanduser()
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "epd-serve" / "logs"


def log_runs() -> list[Path]:
    """The directories of runs, the latest first."""
    return (
        sorted((one for one in log_root().glob("[0-9]*") if one.is_dir()), reverse=True)
        if log_root().is_dir()
        else []
    )


@contextmanager
def new_log_run() -> Iterator[Path | None]:
    """A directory for this run; None where none can be made. At its end the logs stay in it, and whose they are.

    Of the runs that have ended, the oldest are removed beyond :data:`NUM_LOGS_KEPT`.
    """
    try:
        log_root().mkdir(parents=True, exist_ok=True, mode=0o700)
        directory = log_root() / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        directory.mkdir(mode=0o700)
        room = directory / "room"
        try:
            room.write_bytes(bytes(_LOG_ROOM_BYTES))
            room.unlink()
        except OSError:
            shutil.rmtree(directory)
            raise
    except OSError:  # the disk is full, or there is no home
        yield None
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        _prune()
        yield directory
    finally:
        for file in directory.iterdir():
            if file.suffix != ".log" and file.name != RUN_FILE:  # the gateway's file has keys
                shutil.rmtree(file) if file.is_dir() else file.unlink()
        if not log_files(directory):
            shutil.rmtree(directory)
        os.close(descriptor)


def _prune() -> None:
    for old in log_runs()[NUM_LOGS_KEPT:]:
        descriptor = os.open(old, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(old, ignore_errors=True)
        except BlockingIOError:  # it runs
            continue
        finally:
            os.close(descriptor)
