"""One child process: its start, its readiness, its death, its next start and its end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal, Protocol

from epd_serve.errors import InstanceUnreachable, ServeError
from epd_serve.lifeline import CLEAN_UP_S
from epd_serve.rpc.http import MAX_NOTE_BYTES, HttpCall, HttpPool
from epd_serve.rpc.tls import tls_files

#: Lines of a dead process's log that are shown.
TAIL_LINES = 20
_TAIL_BYTES = 64 * 1024
_POLL_INTERVAL_S = 0.1
_POLL_TIMEOUT_S = 2.0
#: So many probes in a row must fail: a machine or a supervisor that was suspended misses one.
_NUM_PROBES = 3
_GROUP_LOOK_S = 0.02
#: Words of vLLM's exceptions that follow from one that its log has before them; and how a line names one.
_NO_CAUSE = re.compile("See root cause above|for the root cause")
_EXCEPTION = re.compile(r"(^|\s)[\w.]+(Error|Exception|Interrupt|Exit): ")
#: Files in which the kernel counts the processes that it killed because memory ran out: of this control group, and
#: of the machine.
OOM_COUNTERS = (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))


class ProcessState(StrEnum):
    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"
    STOPPED = "stopped"
    DIED = "died"
    WAITING = "waiting"  # has died and will be started again


_NEXT: dict[ProcessState, frozenset[ProcessState]] = {
    ProcessState.STARTING: frozenset(
        {ProcessState.LOADING, ProcessState.READY, ProcessState.STOPPING, ProcessState.DIED}
    ),
    ProcessState.LOADING: frozenset({ProcessState.READY, ProcessState.STOPPING, ProcessState.DIED}),
    ProcessState.READY: frozenset({ProcessState.STOPPING, ProcessState.DIED}),
    ProcessState.STOPPING: frozenset({ProcessState.STOPPED}),
    ProcessState.STOPPED: frozenset(),
    ProcessState.DIED: frozenset({ProcessState.WAITING}),
    ProcessState.WAITING: frozenset({ProcessState.STARTING, ProcessState.STOPPED}),
}


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """A command to run, and the server on which it will answer ``GET /health``.

    Attributes:
        name: unique; also the name of the log file.
        label: a few words for the progress display.
        environment: all variables of the process.
        url: base URL of its HTTP server; "": it has none, and is ready once it has started.
        socket: Unix socket at which it is asked in place of ``url``, which another process may share.
        pass_fds: file descriptors that it inherits.
        ready_file: exists as long as it is ready, where it has no such server; the others start only then.
        first_health: path that is asked instead until it is ready for the first time.
        stops: its turn when the deployment ends; the processes of the turns before it have ended by then.
        grace_s: time that it may take to end; None: as others of its turn.
        can_fork: whether it may be forked from a process that has loaded its modules (launch/forking).
        is_group: whether it leads a group that ends with it by itself (``epd_serve.lifeline --group``).
        measures: accelerators whose free memory it measures while it starts; those of one start in turn, as each
            would take the other's growth for its own.
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
    is_group: bool = False
    measures: frozenset[str] = frozenset()


class RunningProcess(Protocol):
    """The part of ``asyncio.subprocess.Process`` that every kind of started process offers."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the signal that ended it; None while it runs."""
        ...

    async def wait(self) -> int: ...

    def terminate(self) -> None:
        """Send SIGTERM. May raise ProcessLookupError."""
        ...


#: Starts a process in a session of its own, its output appended to a file. Raises OSError where that cannot be.
Starter = Callable[[ProcessSpec, Path], Awaitable[RunningProcess]]


class ProcessDied(RuntimeError):
    """A process ended that should not have.

    Attributes:
        name: the process.
        how: "exit code 1", "killed by SIGSEGV".
        end: "p0 died: exit code 1", or "p0 stopped" where its exit code is 0.
        log_tail: the last lines of its output.
        log_file: all of it.
    """

    def __init__(
        self, *, name: str, how: str, log_tail: list[str], log_file: Path, is_clean: bool = False
    ) -> None:
        quoted = "\n".join(f"    {line}" for line in log_tail) or "    (nothing)"
        self.end = f"{name} stopped" if is_clean else f"{name} died: {how}"
        super().__init__(f"{self.end}. The end of its log, {log_file}:\n{quoted}")
        self.name = name
        self.how = how
        self.log_tail = log_tail
        self.log_file = log_file


class ManagedProcess:
    """A started child process in a session of its own, so that a terminal's Ctrl-C does not reach it.

    Attributes:
        spec: the command that it runs.
        log_file: the file for its output, that of all its lives.
        ready_after_s: seconds from its last start until it was ready; None before.
        ready: set while it is ready.
        num_restarts: number of times that it was started again.
        is_retired: whether another process has its place, and it only finishes what it has.
    """

    __slots__ = (
        "_health",
        "_hung",
        "_num_oom_kills",
        "_on_change",
        "_process",
        "_start",
        "_started_at",
        "is_retired",
        "log_file",
        "num_restarts",
        "ready",
        "ready_after_s",
        "spec",
        "state",
    )

    def __init__(
        self,
        spec: ProcessSpec,
        log_file: Path,
        on_change: Callable[[ManagedProcess], None],
        start: Starter,
    ) -> None:
        self.spec = spec
        self.log_file = log_file
        self.state = ProcessState.STARTING
        self.ready_after_s: float | None = None
        self.ready = asyncio.Event()
        self.num_restarts = 0
        self.is_retired = False
        self._hung = ""
        self._num_oom_kills = count_oom_kills()
        self._health = spec.first_health
        self._start = start
        self._process: RunningProcess | None = None
        self._on_change = on_change
        self._started_at = time.monotonic()

    @classmethod
    async def start(
        cls,
        spec: ProcessSpec,
        log_dir: Path,
        on_change: Callable[[ManagedProcess], None],
        start: Starter,
    ) -> ManagedProcess:
        """Start ``spec`` with its output going to ``log_dir / NAME.log``."""
        managed = cls(spec, log_dir / f"{spec.name}.log", on_change, start)
        on_change(managed)
        managed._process = await start(spec, managed.log_file)
        return managed

    async def restart(self) -> None:
        """Start the process once more from its spec. Raises OSError where that is not possible now."""
        self._process = await self._start(self.spec, self.log_file)
        self._started_at = time.monotonic()
        self._hung = ""
        self._num_oom_kills = count_oom_kills()
        self.ready_after_s = None
        self.num_restarts += 1
        self.enter(ProcessState.STARTING)

    @property
    def pid(self) -> int:
        return self._running.pid

    @property
    def _running(self) -> RunningProcess:
        assert self._process is not None, "it has not started"
        return self._process

    @property
    def elapsed_s(self) -> float:
        """Seconds it took to become ready, or since the start while it is not."""
        return time.monotonic() - self._started_at if self.ready_after_s is None else self.ready_after_s

    @property
    def ready_s(self) -> float:
        """Seconds since it became ready; 0 before."""
        return 0.0 if self.ready_after_s is None else time.monotonic() - self._started_at - self.ready_after_s

    async def wait_ready(self) -> None:
        """Return when ``GET /health`` answers 200. Raises ProcessDied when the process ends before."""
        while not await self._poll():
            with suppress(TimeoutError):
                await asyncio.wait_for(self.wait_end(), _POLL_INTERVAL_S)
            if self._running.returncode is not None:
                await self.wait_end()  # its state follows a moment later
                raise self.death()
        self.ready_after_s = self.elapsed_s
        self._health = "/health"
        self.enter(ProcessState.READY)
        self.ready.set()

    def retire(self) -> None:
        """Have the process finish what it has, in the time that this needs, and end: another one has its place."""
        self.is_retired = True
        self.enter(ProcessState.STOPPING)
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGQUIT)

    async def wait_end_or_hang(self, hang_timeout_s: float) -> None:
        """As :meth:`wait_end`; a process that answers nothing for ``hang_timeout_s`` is killed."""
        probe_s, num_failed = hang_timeout_s / _NUM_PROBES, 0
        while self._running.returncode is None:
            started = time.monotonic()
            num_failed = 0 if await self._ask(probe_s) else num_failed + 1
            if num_failed == _NUM_PROBES and self._running.returncode is None:
                self._hung = f"it answered nothing for {hang_timeout_s:g} s and was killed"
                self.kill()
            left_s = max(0.0, started + probe_s - time.monotonic())
            with suppress(TimeoutError):
                await asyncio.wait_for(self.wait_end(), left_s)
        await self.wait_end()

    async def wait_end(self) -> None:
        """Return when the process has ended, for whatever reason, and its own children are gone too."""
        await self._running.wait()
        if self.state in (ProcessState.STOPPED, ProcessState.DIED, ProcessState.WAITING):
            return
        self.ready.clear()
        with suppress(ProcessLookupError):  # the rest of its group, right now, while its id is not used again
            if self.spec.is_group:
                await self._clean_up()
            os.killpg(self.pid, signal.SIGKILL)
        self.enter(ProcessState.STOPPED if self.state is ProcessState.STOPPING else ProcessState.DIED)

    async def _clean_up(self) -> None:
        """Wait for the group to clean up and end (:mod:`epd_serve.lifeline`). Raises ProcessLookupError then."""
        deadline = time.monotonic() + CLEAN_UP_S + 1.0
        while time.monotonic() < deadline:
            os.killpg(self.pid, 0)
            await asyncio.sleep(_GROUP_LOOK_S)

    async def stop(self, grace_s: float) -> None:
        """Ask the process to end (SIGTERM), and after ``grace_s`` seconds end it (SIGKILL)."""
        if self.state is ProcessState.WAITING:
            self.enter(ProcessState.STOPPED)
        if self._running.returncode is None and self.state is not ProcessState.STOPPING:
            self.enter(ProcessState.STOPPING)
            with suppress(ProcessLookupError):
                self._running.terminate()
        try:
            await asyncio.wait_for(self.wait_end(), grace_s)
        except TimeoutError:
            self.kill()
            await self.wait_end()

    def kill(self) -> None:
        """End the process and its children at once."""
        if self._running.returncode is None:
            with suppress(ProcessLookupError):
                (os.kill if self.spec.is_group else os.killpg)(self.pid, signal.SIGKILL)

    def death(self) -> ProcessDied:
        """The process's exit code or signal, with the end of its log."""
        code = self._running.returncode
        assert code is not None, "the process is still running"
        if code >= 0:
            how = f"exit code {code}"
        else:
            how = self._hung or f"killed by {signal.Signals(-code).name}"
            if -code == signal.SIGKILL and not self._hung and count_oom_kills() > self._num_oom_kills:
                how += ", as the kernel killed a process because memory ran out"
        return ProcessDied(
            name=self.spec.name,
            how=how,
            log_tail=self.log_tail(),
            log_file=self.log_file,
            is_clean=code == 0,
        )

    def note(self, death: ProcessDied) -> None:
        """Write how the process ended behind what it said itself."""
        with suppress(OSError), self.log_file.open("a", encoding="utf-8") as log:  # a full disk
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {death.end}\n")

    def log_tail(self) -> list[str]:
        """Return the last lines of the process's output: up to the exception that vLLM calls the root cause."""
        if not self.log_file.exists():  # it was killed before it had made the file
            return []
        with self.log_file.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = log.read().decode("utf-8", "replace").splitlines()
        if any(_NO_CAUSE.search(line) for line in lines[-TAIL_LINES:]):
            causes = [i for i, line in enumerate(lines) if _EXCEPTION.search(line) and not _NO_CAUSE.search(line)]
            lines = lines[: causes[-1] + 1] if causes else lines
        return lines[-TAIL_LINES:]

    async def _poll(self) -> bool:
        """Ask once whether the process is ready; one that listens and is not ready is loading."""
        status = await self._ask(_POLL_TIMEOUT_S)
        if self.state is ProcessState.STARTING and status not in (None, 200):
            self.enter(ProcessState.LOADING)
        return status == 200

    async def _ask(self, timeout_s: float) -> int | None:
        """The status of ``GET /health``; 0 where there is no answer, None where nobody listens."""
        if not self.spec.url:
            return 200 if self.spec.ready_file is None or self.spec.ready_file.exists() else None
        tls, path = tls_files(self.spec.environment), self.spec.socket
        url = "http://socket" if path is not None else self.spec.url
        async with HttpPool(self.spec.name, url, tls=None if path is not None else tls, path=path) as pool:
            call = HttpCall(pool, "GET", self._health)
            try:
                async with asyncio.timeout(timeout_s):
                    await call.ask(MAX_NOTE_BYTES)
            except InstanceUnreachable:
                return None
            except (ServeError, TimeoutError):
                pass
            return call.status

    def enter(self, state: ProcessState) -> None:
        """Change its state; WAITING is that of one that has died, until :meth:`restart`."""
        assert state in _NEXT[self.state], f"{self.spec.name}: {self.state} → {state}"
        self.state = state
        self._on_change(self)


def count_oom_kills() -> int:
    """Return how many processes the kernel has killed because memory ran out; 0 where it does not say."""
    for file in OOM_COUNTERS:
        with suppress(OSError):
            if found := re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE):
                return int(found[1])
    return 0


async def spawn(spec: ProcessSpec, log_file: Path, *, shares_output: bool = False) -> asyncio.subprocess.Process:
    """Spawn a process: the usual :data:`Starter`. ``shares_output``: it writes where this process writes."""
    with log_file.open("ab") as log:
        return await asyncio.create_subprocess_exec(
            *spec.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=None if shares_output else log,
            stderr=None if shares_output else log,
            env=dict(spec.environment),
            start_new_session=True,
            pass_fds=spec.pass_fds,
        )
