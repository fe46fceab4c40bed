"""``epd-serve up --detach``: the launcher moves to the background once the deployment is ready."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path


def fork_launcher() -> int:
    """Return in a child process, with a descriptor for :func:`leave_terminal`.

    The parent ends when the child has left the terminal, or with the child's exit code. Ctrl-C ends both.
    """
    reader, writer = os.pipe()
    if pid := os.fork():
        os.close(writer)
        try:
            is_ready = os.read(reader, 1)
        except KeyboardInterrupt:
            os.kill(pid, signal.SIGTERM)
            is_ready = b""
        raise SystemExit(0 if is_ready else os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os.close(reader)
    os.setsid()
    # not inheritable: a shell waits until all writers of its pipe have ended
    sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w", buffering=1) for number in (1, 2))
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    return writer


def leave_terminal(writer: int, log_dir: Path) -> None:
    """Write to ``up.log`` from now on, and release the parent, which waits at the terminal."""
    log = os.open(log_dir / "up.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno(), inheritable=False)
    os.write(writer, b"r")
    os.close(writer)
