"""NVIDIA's MPS, which lets processes compute on one GPU at once, each on its share: daemon and variables.

``python -m device.mps PARENT_PID`` runs a daemon while its parent lives, in the directories named by the
variables. Does not import torch.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from device.base import check_share

PIPES = "CUDA_MPS_PIPE_DIRECTORY"
LOGS = "CUDA_MPS_LOG_DIRECTORY"
SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
CONTROL = "nvidia-cuda-mps-control"
_DEFAULT_PIPES = "/tmp/nvidia-mps"
_LOOK_AGAIN_S = 0.1
_START_S = 10.0
#: Grace period for remaining clients.
_QUIT = b"quit -t 1\n"
_PR_SET_PDEATHSIG = 1


def pid_file(environment: Mapping[str, str]) -> Path:
    """Return the pid file that the daemon keeps in its pipe directory."""
    return Path(environment.get(PIPES) or _DEFAULT_PIPES, f"{CONTROL}.pid")


def is_running(environment: Mapping[str, str]) -> bool:
    """Return whether a daemon runs for processes with these variables, possibly in another container."""
    return pid_file(environment).exists()


def share_variables(share: float) -> dict[str, str]:
    """Return the variables that give a process a share of a GPU's multiprocessors.

    Raises ValueError as ``apply_share`` does.
    """
    check_share(share, 0.0)
    return {SHARE: f"{share * 100:g}"}


def own_daemon(directory: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables, for daemon and clients, of a separate daemon in ``directory``.

    Raises ValueError if the program is missing or the socket paths would be too long.
    """
    if shutil.which(CONTROL, path=environment.get("PATH")) is None:
        raise ValueError(
            f"shares of a GPU need MPS, but {CONTROL}, part of NVIDIA's driver, was not found: install it, "
            f"start MPS yourself and set {PIPES}, or remove 'share': memory_share splits only the memory"
        )
    if len(str(directory)) > 80:
        raise ValueError(f"{directory} is too long for MPS's sockets; choose a shorter directory for the logs")
    return {PIPES: str(directory), LOGS: str(directory)}


def run_daemon(parent_pid: int) -> int:
    """Start the daemon and return 1 once it ends by itself. SIGTERM or the parent's end stops it."""
    environment = dict(os.environ)
    # A daemon restricted to some GPUs renumbers them, and its clients' numbers would then be wrong.
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    file = pid_file(environment)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)  # left by a killed daemon
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent_pid:
        return 0
    with _ended_with_us(environment):
        code = subprocess.run([CONTROL, "-d"], env=environment, check=False).returncode
        until_s = time.monotonic() + _START_S
        while (pid := _read_pid(file)) is None and code == 0 and time.monotonic() < until_s:
            time.sleep(_LOOK_AGAIN_S)
        if pid is None:
            print(f"{CONTROL} -d failed: exit code {code}, no pid in {file}", flush=True)
            return 1
        print(f"MPS is running as process {pid}; logs in {environment.get(LOGS)}", flush=True)
        while _lives(pid):
            time.sleep(_LOOK_AGAIN_S)
        print(f"MPS process {pid} has ended", flush=True)
        return 1


@contextmanager
def _ended_with_us(environment: Mapping[str, str]) -> Iterator[None]:
    """Make a guard process stop the daemon when the context ends or this process is killed."""
    reader, writer = os.pipe()
    if (guard := os.fork()) == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.close(writer)
        os.read(reader, 1)  # returns when the last writer is closed
        if (file := pid_file(environment)).exists():
            subprocess.run([CONTROL], input=_QUIT, env=environment, check=False)
            file.unlink(missing_ok=True)
        os._exit(0)
    try:
        yield
    finally:
        os.close(writer)
        os.waitpid(guard, 0)


def _read_pid(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # it is about to be written
        return None


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="latin-1").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


if __name__ == "__main__":
    sys.exit(run_daemon(int(sys.argv[1])))
