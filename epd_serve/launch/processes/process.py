"""A command to run as a child process, and the way in which it ended."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal

from epd_serve import lifeline
from epd_serve.launch.processes.forking import ForkedProcess, fork

#: Lines of a dead process's log to show.
TAIL_LINES = 20
_TAIL_BYTES = 64 * 1024
#: vLLM's last exceptions refer to the cause earlier in its log; the form of an exception's line.
_NO_CAUSE = re.compile("See root cause above|for the root cause")
_EXCEPTION = re.compile(r"(^|\s)[\w.]+(Error|Exception|Interrupt|Exit): ")

#: A started process. ``returncode`` is the exit code, or minus the signal that ended it; None while it runs.
RunningProcess = asyncio.subprocess.Process | ForkedProcess


class ProcessState(StrEnum):
    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"
    STOPPED = "stopped"
    DIED = "died"
    WAITING = "waiting"  # dead, and about to be restarted


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """A command, and the server that answers its ``GET /health``.

    Attributes:
        name: unique; also the name of the log file.
        label: text for the progress display.
        environment: all variables of the process.
        url: base URL of its HTTP server; "": no server, ready once started.
        socket: Unix socket to ask instead of ``url``, which another process may share.
        pass_fds: inherited file descriptors.
        ready_file: exists while a process without a server is ready; the others start only then.
        first_health: path to ask until it is ready for the first time.
        stops: turn in which it ends with the deployment.
        grace_s: time to end; None: that of its turn.
        can_fork: whether it may be forked from a process with its modules loaded (forking.py).
        shares_output: whether it writes to this process's output instead of its log.
        is_group: whether its process group ends with it, as vLLM leaves children behind.
        measures: accelerators whose free memory it measures at its start, as vLLM does. Such processes start one
            after another on a device, as each would count the other's memory as its own.
    """

    name: str
    label: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    url: str = ""
    socket: Path | None = None
    pass_fds: tuple[int, ...] = ()
    ready_file: Path | None = None
    first_health: str = "/health"
    stops: Literal["first", "then", "last"] = "then"
    grace_s: float | None = None
    can_fork: bool = False
    shares_output: bool = False
    is_group: bool = False
    measures: frozenset[str] = frozenset()


async def spawn(spec: ProcessSpec, log_file: Path) -> RunningProcess:
    """Start a process in a session of its own, its output appended to a file. It ends with this process.

    Raises OSError.
    """
    if spec.can_fork:
        return await fork(spec.name, spec.command, spec.environment, log_file)
    # as a script it loads nothing else: the waiting half of a group would keep a copy
    tie = (sys.executable, "-IS", lifeline.__file__, *(["--group"] if spec.is_group else []), str(os.getpid()))
    with log_file.open("ab") as log:
        return await asyncio.create_subprocess_exec(
            *tie,
            *spec.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=None if spec.shares_output else log,
            stderr=None if spec.shares_output else log,
            env=dict(spec.environment),
            start_new_session=True,
            pass_fds=spec.pass_fds,
        )


class ProcessDied(RuntimeError):
    """A process ended unexpectedly.

    Attributes:
        name: the process.
        how: "exit code 1", "killed by SIGSEGV".
        end: "p0 died: exit code 1", or "p0 stopped" for exit code 0.
        log_tail: the last lines of its output.
        log_file: all of it.
    """

    def __init__(self, name: str, how: str, log_file: Path) -> None:
        self.name, self.how, self.log_file, self.log_tail = name, how, log_file, log_tail(log_file)
        self.end = f"{name} stopped" if how == "exit code 0" else f"{name} died: {how}"
        quoted = "\n".join(f"    {line}" for line in self.log_tail) or "    (nothing)"
        super().__init__(f"{self.end}. The end of its log, {log_file}:\n{quoted}")


def log_tail(log_file: Path) -> list[str]:
    """Return the last lines of the output, or those up to the exception that vLLM calls the root cause."""
    if not log_file.exists():  # killed before it created the file
        return []
    with log_file.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = log.read().decode("utf-8", "replace").splitlines()
    if any(_NO_CAUSE.search(line) for line in lines[-TAIL_LINES:]):
        causes = [i for i, line in enumerate(lines) if _EXCEPTION.search(line) and not _NO_CAUSE.search(line)]
        lines = lines[: causes[-1] + 1] if causes else lines
    return lines[-TAIL_LINES:]
