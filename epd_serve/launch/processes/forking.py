"""Instances forked from multiprocessing's fork server, which has imported their modules.

They start at once and share the modules' memory. The server neither computes nor opens a device.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import runpy
import signal
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import psutil

from epd_serve.config import DeploymentConfig, ShapeConfig
from epd_serve.lifeline import die_with_parent

#: Heap of an instance: huge pages, which load weights faster; one heap for all threads; no memory returned between
#: steps, as it would be faulted in again. A user's own GLIBC_TUNABLES replace these.
HEAP_TUNABLES = "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1" + "".join(
    f":glibc.malloc.{limit}_threshold={1 << 30}" for limit in ("mmap", "trim")
)
#: Modules of all instances.
_MODULES = ("epd_serve.cli.instance", "epd_serve.instance.main")
#: Libraries read these when they are loaded, in the server: one thread, as threads do not survive a fork; torch
#: looks for GPUs without a CUDA call, after which no fork could use CUDA.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
#: Set for the server, which imports this module first.
_LAUNCHER = "EPD_SERVE_LAUNCHER"
#: Set when the server was killed, until the next deployment starts.
_is_ended = threading.Event()

if launcher_pid := os.environ.pop(_LAUNCHER, ""):
    die_with_parent(int(launcher_pid))  # also while it imports
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal: the launcher ends this process
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    gc.disable()  # collections take a fifth of torch's import time


class ForkedProcess:
    """A forked process with the interface of ``asyncio.subprocess.Process`` that a supervisor uses."""

    def __init__(self, process: ForkServerProcess) -> None:
        assert process.pid is not None
        self.pid = process.pid
        self._process = process
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(process.sentinel, self._on_end)

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self._ended.set()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    async def wait(self) -> int:
        await self._ended.wait()
        code = self._process.exitcode
        assert code is not None
        return code


def can_fork(config: DeploymentConfig, devices: Collection[str]) -> bool:
    """Return whether native instances on these devices are forked.

    CUDA allows it before its first call; torch_npu does not document it.
    """
    return isinstance(config.model, ShapeConfig) or not any(one.startswith("npu") for one in devices)


def preload(config: DeploymentConfig) -> None:
    """Start the fork server, if the deployment needs it and it is not running. Imports take most of its start."""
    devices = [one.devices for one in config.placement()]
    if config.engine == "vllm" or not any(can_fork(config, own) for own in devices):
        return
    modules, environment = [*_MODULES, "epd_serve.instance.loading.shape_model"], dict(_ENVIRONMENT)
    if isinstance(config.model, str):
        modules = [*_MODULES, "epd_serve.instance.loading.checkpoint", "epd_serve.models.renamings"]
        modules += ["device.cuda"] if any(own[0].startswith("cuda") for own in devices) else []
        environment["GLIBC_TUNABLES"] = os.environ.get("GLIBC_TUNABLES", HEAP_TUNABLES)
    multiprocessing.set_forkserver_preload([__name__, *modules])
    before = dict(os.environ)
    os.environ.update({**environment, _LAUNCHER: str(os.getpid())})
    resource_tracker.ensure_running()  # its start would unblock the signal
    _is_ended.clear()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.environ.clear()
        os.environ.update(before)


def end_idle_server() -> None:
    """Kill a fork server without forks, as while it imports; waiting calls of :func:`fork` then fail."""
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # killed before
            if "multiprocessing.forkserver" in " ".join(child.cmdline()) and not child.children():
                _is_ended.set()
                child.kill()


async def fork(name: str, command: Sequence[str], environment: Mapping[str, str], log_file: Path) -> ForkedProcess:
    """Run ``python -P -m MODULE ARGUMENTS`` with its own environment. Raises OSError."""
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_run, args=(name, command, dict(environment), str(log_file)))
    try:
        await asyncio.to_thread(_start, process)
    except EOFError:  # torch and torchvision of different builds, for example
        raise ChildProcessError(
            "Python cannot import the modules of instances: repair the environment; the last error is above"
        ) from None
    return ForkedProcess(process)


def _start(process: ForkServerProcess) -> None:
    """Fork a process once the server has imported its modules. This may wait for one of few threads."""
    if _is_ended.is_set():  # multiprocessing would start another server
        raise ChildProcessError("the fork server has ended")
    process.start()


def _run(name: str, command: Sequence[str], environment: Mapping[str, str], log_file: str) -> None:
    """Run a command in the forked process, which ends with the fork server and with the launcher."""
    die_with_parent(os.getppid())
    gc.freeze()  # a collection does not copy the objects that all forks share
    gc.enable()
    launcher = multiprocessing.parent_process()
    assert launcher is not None

    def end_with_launcher() -> None:  # which is not the parent
        launcher.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end_with_launcher, daemon=True).start()
    os.setsid()
    Path("/proc/self/comm").write_text(f"epd-serve {name}")  # for lists of processes; its command is the server's
    log = os.open(log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for target in (1, 2):
        os.dup2(log, target)
    os.close(log)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [*command[3:]]
    runpy.run_module(command[3], run_name="__main__", alter_sys=True)
