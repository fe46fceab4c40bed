"""A stand-in for NVIDIA's nvidia-cuda-mps-control, which a machine without its driver cannot have.

It is a real daemon: it leaves its parent, keeps a process number in its pipe directory, listens on a socket there
and ends at ``quit``. It computes nothing and serves no GPU.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

NAME = "nvidia-cuda-mps-control"


def install(folder: Path) -> str:
    """Put it into a folder; returns a PATH that begins with it."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / NAME
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {__file__} "$@"\n')
    program.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def main() -> int:
    pipes = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
    pid, control = pipes / f"{NAME}.pid", pipes / "control"
    if sys.argv[1:] != ["-d"]:
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(str(control))
            except OSError:
                print("no daemon answers", flush=True)
                return 1
            client.sendall(sys.stdin.buffer.read())
            client.shutdown(socket.SHUT_WR)
            client.recv(1)  # it has ended
        return 0
    control.unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(control))
    server.listen()
    if os.fork():
        return 0
    os.setsid()
    if os.fork():
        os._exit(0)
    with Path(os.environ["CUDA_MPS_LOG_DIRECTORY"], "control.log").open("a") as log:
        log.write(f"visible: {os.environ.get('CUDA_VISIBLE_DEVICES', 'all')}\n")
    pid.write_text(str(os.getpid()))
    while True:
        client, _ = server.accept()
        if client.recv(100).startswith(b"quit"):
            pid.unlink()
            return 0


if __name__ == "__main__":
    sys.exit(main())
