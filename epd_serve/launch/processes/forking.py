"""Processes forked from multiprocessing's fork server, which has imported what instances on CPUs run.

They start at once and share the memory of the modules. The server never computes and opens no device.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import multiprocessing
import os
import runpy
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from epd_serve.launch.processes.process import ProcessSpec

#: Read when libraries are loaded, so the server has them for all: a fork has no threads but its own.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}


class ForkedProcess:
    """A forked process: the part of ``asyncio.subprocess.Process`` that a supervisor uses.

    Attributes:
        returncode: None while it runs; negative: the signal that ended it.
    """

    __slots__ = ("_ended", "_process", "pid")

    def __init__(self, process: ForkServerProcess) -> None:
        assert process.pid is not None
        self.pid = process.pid
        self._process = process
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(process.sentinel, self._on_end)

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        with suppress(ProcessLookupError):  # the rest of its session
            os.killpg(self.pid, signal.SIGKILL)
        self._ended.set()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    async def wait(self) -> int:
        await self._ended.wait()
        code = self._process.exitcode
        assert code is not None, "its sentinel says that it has ended"
        return code

    def terminate(self) -> None:
        self._process.terminate()


def preload(modules: Sequence[str], environment: Mapping[str, str]) -> None:
    """Have this process's fork server import ``modules``; nothing happens where it runs already.

    ``environment``: variables that libraries read when they are loaded.
    """
    multiprocessing.set_forkserver_preload([*modules, "epd_serve.launch.processes.frozen"])
    added = {**environment, **_ENVIRONMENT}
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


async def fork(spec: ProcessSpec, log_file: Path) -> ForkedProcess:
    """Start ``python -P -m MODULE ARGUMENTS`` with an environment of its own. Raises OSError."""
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_run, args=(spec.command, dict(spec.environment), str(log_file)))
    await asyncio.to_thread(process.start)  # waits until the server has imported its modules
    return ForkedProcess(process)


def _run(command: Sequence[str], environment: Mapping[str, str], log_file: str) -> None:
    """Run a command in the forked process."""
    _die_with_launcher()
    os.setsid()
    log = os.open(log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for target in (1, 2):
        os.dup2(log, target)
    os.close(log)
    os.environ.clear()
    os.environ.update(environment)
    arguments = list(command[4:])
    if "--parent-pid" in arguments:  # dies with the fork server, too
        arguments[arguments.index("--parent-pid") + 1] = str(os.getppid())
    _show(command)
    sys.argv = [command[3], *arguments]
    runpy.run_module(command[3], run_name="__main__", alter_sys=True)


def _show(command: Sequence[str]) -> None:
    """Put the command, as far as there is room, where the kernel keeps a process's own (proc(5), cmdline)."""
    values = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = int(values[45]), int(values[46])  # arg_start and arg_end, counted from behind the name
    text = os.fsencode("\0".join(command))[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


def _die_with_launcher() -> None:
    """Have the kernel kill this process when the launcher ends, which is not its parent (fcntl(2), F_SETSIG)."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    pipe = launcher.sentinel
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([pipe], [], [], 0)[0]:  # it ended before
        os.kill(os.getpid(), signal.SIGKILL)
