"""The logs of ``epd-serve up``: a directory for each run; the last runs stay."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NUM_KEPT = 10


def root() -> Path:
    """``EPD_SERVE_LOG_DIR``, or a directory in that for the user's state."""
    if own := os.environ.get("EPD_SERVE_LOG_DIR"):
        return Path(own).expanduser()
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "epd-serve" / "logs"


def runs() -> list[Path]:
    """The directories of runs, the latest first."""
    return sorted((one for one in root().glob("[0-9]*") if one.is_dir()), reverse=True) if root().is_dir() else []


@contextmanager
def new_run() -> Iterator[Path | None]:
    """A directory for this run; None where none can be made. At its end the logs alone stay in it.

    Of the runs that have ended, the oldest are removed beyond :data:`NUM_KEPT`.
    """
    try:
        root().mkdir(parents=True, exist_ok=True, mode=0o700)
        directory = root() / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        directory.mkdir(mode=0o700)
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
            if file.suffix != ".log":  # what instances shared, the gateway's file with its keys
                shutil.rmtree(file) if file.is_dir() else file.unlink()
        if not any(directory.iterdir()):
            directory.rmdir()
        os.close(descriptor)


def _prune() -> None:
    for old in runs()[NUM_KEPT:]:
        descriptor = os.open(old, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(old, ignore_errors=True)
        except BlockingIOError:  # it runs
            continue
        finally:
            os.close(descriptor)
