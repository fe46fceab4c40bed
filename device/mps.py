"""NVIDIA's MPS, by which processes compute on one GPU at once, each on its share: its daemon and its variables.

``python -m device.mps PARENT_PID`` runs a daemon for as long as its parent lives, in the directories that the
variables name. No torch in here.
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

from device.shares import check_share

PIPES = "CUDA_MPS_PIPE_DIRECTORY"
LOGS = "CUDA_MPS_LOG_DIRECTORY"
SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
CONTROL = "nvidia-cuda-mps-control"
_DEFAULT_PIPES = "/tmp/nvidia-mps"
_LOOK_AGAIN_S = 0.1
_START_S = 10.0
#: Clients that are still there are given so long.
_QUIT = b"quit -t 1\n"
_PR_SET_PDEATHSIG = 1


def pid_file(environment: Mapping[str, str]) -> Path:
    """The file that the daemon keeps in its pipe directory as long as it runs."""
    return Path(environment.get(PIPES) or _DEFAULT_PIPES, f"{CONTROL}.pid")


def is_running(environment: Mapping[str, str]) -> bool:
    """Whether there is a daemon for processes with these variables. It may be one of another container."""
    return pid_file(environment).exists()


def share_variables(share: float) -> dict[str, str]:
    """The variables of a process that shall have this share of a GPU's multiprocessors.

    Raises ValueError as ``apply_share`` does.
    """
    check_share(share, 0.0)
    return {SHARE: f"{share * 100:g}"}


def own_daemon(directory: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a daemon of one's own in ``directory``, for itself and its clients.

    Raises ValueError where there is no such program, and for a directory whose sockets would have too long names.
    """
    if shutil.which(CONTROL, path=environment.get("PATH")) is None:
        raise ValueError(
            f"shares of a GPU need MPS, and there is no {CONTROL}, which comes with NVIDIA's driver: install it, "
            f"start MPS yourself and set {PIPES}, or leave 'share' out: memory_share parts the memory alone"
        )
    if len(str(directory)) > 80:
        raise ValueError(f"{directory} is too long for MPS's sockets; choose a shorter directory for the logs")
    return {PIPES: str(directory), LOGS: str(directory)}


def run_daemon(parent_pid: int) -> int:
    """Start the daemon; return 1 when it has ended by itself. SIGTERM and the parent's end are its end, too."""
    environment = dict(os.environ)
    # A daemon that sees some GPUs counts them anew, and its clients' numbers would name others.
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    file = pid_file(environment)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)  # of one that was killed
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
            print(f"{CONTROL} -d does not run: exit code {code}, no process number in {file}", flush=True)
            return 1
        print(f"MPS runs, process {pid}; its logs are in {environment.get(LOGS)}", flush=True)
        while _lives(pid):
            time.sleep(_LOOK_AGAIN_S)
        print(f"MPS is gone: its process {pid} has ended", flush=True)
        return 1


@contextmanager
def _ended_with_us(environment: Mapping[str, str]) -> Iterator[None]:
    """A context at whose end a process tells the daemon to quit, as it does where this process is killed."""
    reader, writer = os.pipe()
    if (guard := os.fork()) == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.close(writer)
        os.read(reader, 1)  # until no process can write
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
