"""One child process: start, readiness, death, restart and end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal

from epd_serve.errors import InstanceUnreachable, ServeError
from epd_serve.launch.processes.forking import ForkedProcess, fork
from epd_serve.lifeline import CLEAN_UP_S
from epd_serve.rpc.http import HttpPool, HttpServer
from epd_serve.rpc.tls import tls_files

#: Lines of a dead process's log to show.
TAIL_LINES = 20
_TAIL_BYTES = 64 * 1024
_POLL_INTERVAL_S, _POLL_TIMEOUT_S = 0.1, 2.0
#: Consecutive failed probes that mean a hang: after a suspension of the machine a single one may fail.
_NUM_PROBES = 3
_GROUP_LOOK_S = 0.02
#: vLLM's last exceptions refer to the cause earlier in its log; the form of an exception's line.
_NO_CAUSE = re.compile("See root cause above|for the root cause")
_EXCEPTION = re.compile(r"(^|\s)[\w.]+(Error|Exception|Interrupt|Exit): ")


class ProcessState(StrEnum):
    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"
    STOPPED = "stopped"
    DIED = "died"
    WAITING = "waiting"  # dead, and about to be restarted


_ENDED = (ProcessState.STOPPED, ProcessState.DIED, ProcessState.WAITING)


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
        is_group: whether its process group ends with it (``epd_serve.lifeline --group``).
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


#: A started process. ``returncode`` is the exit code, or minus the signal that ended it; None while it runs.
RunningProcess = asyncio.subprocess.Process | ForkedProcess


class ProcessDied(RuntimeError):
    """A process ended unexpectedly.

    Attributes:
        name: the process.
        how: "exit code 1", "killed by SIGSEGV".
        end: "p0 died: exit code 1", or "p0 stopped" for exit code 0.
        log_tail: the last lines of its output.
        log_file: all of it.
    """

    def __init__(self, name: str, how: str, log_tail: list[str], log_file: Path) -> None:
        quoted = "\n".join(f"    {line}" for line in log_tail) or "    (nothing)"
        self.end = f"{name} stopped" if how == "exit code 0" else f"{name} died: {how}"
        super().__init__(f"{self.end}. The end of its log, {log_file}:\n{quoted}")
        self.name, self.how, self.log_tail, self.log_file = name, how, log_tail, log_file


class ManagedProcess:
    """A child process in a session of its own, so that a terminal's Ctrl-C does not reach it.

    Attributes:
        log_file: the file for its output, across restarts.
        state: STARTING before its start, too.
        ready: set while it is ready.
        is_retired: whether another process has replaced it, and it only finishes its requests.
    """

    def __init__(self, spec: ProcessSpec, log_dir: Path, on_change: Callable[[ManagedProcess], None]) -> None:
        self.spec = spec
        self.log_file = log_dir / f"{spec.name}.log"
        self.state = ProcessState.STARTING
        self.ready = asyncio.Event()
        self.num_starts = 0
        self.is_retired = False
        self._on_change = on_change
        self._starting: asyncio.Future[RunningProcess] | None = None
        self._process: RunningProcess | None = None
        self._health = spec.first_health
        self._started_at = self._ready_at = time.monotonic()
        self._hung = ""

    @property
    def num_restarts(self) -> int:
        return max(0, self.num_starts - 1)

    @property
    def pid(self) -> int:
        assert self._process is not None, "the process was not started"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def elapsed_s(self) -> float:
        """Seconds from the last start until it was ready, or until now."""
        return (self._ready_at if self.ready.is_set() else time.monotonic()) - self._started_at

    async def start(self) -> None:
        """Start the process, or restart it after its death. Raises OSError."""
        self._started_at, self._hung = time.monotonic(), ""
        self.enter(ProcessState.STARTING)
        self._starting = asyncio.ensure_future(spawn(self.spec, self.log_file))
        self._process = await asyncio.shield(self._starting)
        self.num_starts += 1

    async def wait_ready(self) -> None:
        """Return when ``GET /health`` answers 200. Raises ProcessDied if the process ends before."""
        while (status := await self._ask(_POLL_TIMEOUT_S)) != 200:
            if self.state is ProcessState.STARTING and status is not None:  # it listens
                self.enter(ProcessState.LOADING)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.wait_end(), _POLL_INTERVAL_S)
            if not self.is_running:
                await self.wait_end()
                raise self.death()
        self._ready_at, self._health = time.monotonic(), "/health"
        self.ready.set()
        self.enter(ProcessState.READY)

    async def wait_end_or_hang(self, hang_timeout_s: float) -> float:
        """Return when the process has ended, with the seconds for which it was ready.

        Kills it if it answers nothing for ``hang_timeout_s``.
        """
        probe_s, num_failed = hang_timeout_s / _NUM_PROBES, 0
        while self.is_running:
            started = time.monotonic()
            num_failed = 0 if await self._ask(probe_s) else num_failed + 1
            if num_failed == _NUM_PROBES and self.is_running:
                self._hung = f"it answered nothing for {hang_timeout_s:g} s and was killed"
                self.kill()
            with suppress(TimeoutError):
                await asyncio.wait_for(self.wait_end(), max(0.0, started + probe_s - time.monotonic()))
        await self.wait_end()
        return time.monotonic() - self._ready_at

    async def wait_end(self) -> None:
        """Return when the process and its children have ended."""
        assert self._process is not None
        await self._process.wait()
        if self.state in _ENDED:
            return
        self.ready.clear()
        with suppress(ProcessLookupError):  # the rest of its group, before its id is reused
            deadline = time.monotonic() + CLEAN_UP_S + 1.0
            while self.spec.is_group and time.monotonic() < deadline:  # its group ends with it
                os.killpg(self.pid, 0)
                await asyncio.sleep(_GROUP_LOOK_S)
            os.killpg(self.pid, signal.SIGKILL)
        self.enter(ProcessState.STOPPED if self.state is ProcessState.STOPPING else ProcessState.DIED)

    def retire(self) -> None:
        """Let a replaced process finish its requests, without a time limit, and end."""
        self.is_retired = True
        self._signal(signal.SIGQUIT)

    async def stop(self, grace_s: float) -> None:
        """Ask the process to end (SIGTERM), and kill it after ``grace_s`` seconds."""
        if self._starting is not None:  # a cancelled start continues
            with suppress(OSError):
                self._process = await self._starting
        if self._process is None:
            self.state = ProcessState.STOPPED
            return
        if self.state is ProcessState.WAITING:
            self.enter(ProcessState.STOPPED)
        if self.is_running and self.state is not ProcessState.STOPPING:
            self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.wait_end(), grace_s)
        except TimeoutError:
            self.kill()
            await self.wait_end()

    def _signal(self, number: signal.Signals) -> None:
        self.enter(ProcessState.STOPPING)
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process and its children."""
        if self.is_running:
            with suppress(ProcessLookupError):
                (os.kill if self.spec.is_group else os.killpg)(self.pid, signal.SIGKILL)

    def death(self) -> ProcessDied:
        """Return the exit code or signal, and the end of the log."""
        assert self._process is not None
        code = self._process.returncode
        assert code is not None, "the process is still running"
        how = f"exit code {code}" if code >= 0 else self._hung or f"killed by {signal.Signals(-code).name}"
        return ProcessDied(self.spec.name, how, self.log_tail(), self.log_file)

    def log_tail(self) -> list[str]:
        """Return the last lines of the output, or those up to the exception that vLLM calls the root cause."""
        if not self.log_file.exists():  # killed before it created the file
            return []
        with self.log_file.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = log.read().decode("utf-8", "replace").splitlines()
        if any(_NO_CAUSE.search(line) for line in lines[-TAIL_LINES:]):
            causes = [i for i, line in enumerate(lines) if _EXCEPTION.search(line) and not _NO_CAUSE.search(line)]
            lines = lines[: causes[-1] + 1] if causes else lines
        return lines[-TAIL_LINES:]

    async def _ask(self, timeout_s: float) -> int | None:
        """Return the status of ``GET /health``; 0 without an answer, None if no server listens."""
        if not self.spec.url:
            return 200 if self.spec.ready_file is None or self.spec.ready_file.exists() else None
        path = self.spec.socket
        url, tls = (self.spec.url, tls_files(self.spec.environment)) if path is None else ("http://socket", None)
        async with HttpPool(tls, path) as pool:
            try:
                async with asyncio.timeout(timeout_s):
                    answer = await HttpServer(self.spec.name, url, pool).send("GET", self._health)
            except InstanceUnreachable:
                return None
            except (ServeError, TimeoutError):
                return 0
            answer.close()
            return answer.status

    def enter(self, state: ProcessState) -> None:
        self.state = state
        self._on_change(self)


async def spawn(spec: ProcessSpec, log_file: Path) -> RunningProcess:
    """Start a process in a session of its own, its output appended to a file. Raises OSError."""
    if spec.can_fork:
        return await fork(spec.name, spec.command, spec.environment, log_file)
    with log_file.open("ab") as log:
        return await asyncio.create_subprocess_exec(
            *spec.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=None if spec.shares_output else log,
            stderr=None if spec.shares_output else log,
            env=dict(spec.environment),
            start_new_session=True,
            pass_fds=spec.pass_fds,
        )
