"""A process that has loaded what instances run, and forks them: they start at once and share that memory.

``python -P -m epd_serve.launch.fork_server FD PARENT_PID MODULE... ROOM`` imports the modules, tells on the
inherited socket whether it can be forked, and then takes a line of JSON for each process. The last argument is
room in which these write what they run, for ps to show. Its processes end with it, and it ends with the process
that started it. :mod:`epd_serve.launch.forking` is the other side.

A fork is safe here because the server never computes: it has one thread, and no device is opened in it. Where an
import starts a thread (a CUDA driver's, say), the server says so and is not used.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from epd_serve.lifeline import die_with_parent

_LINE_BYTES = 1 << 20


def serve(connection: socket.socket) -> list[str] | None:
    """Fork processes until the other side is gone.

    Returns twice, as fork does: in a new process its command, and in the server, with all processes killed, None.
    """
    poll, pids, pending = select.poll(), dict[int, int](), b""
    poll.register(connection, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor in pids:
                poll.unregister(descriptor)
                _send(connection, {"ended": pids[descriptor], "code": _reap(pids.pop(descriptor))})
                os.close(descriptor)
                continue
            received = connection.recv(_LINE_BYTES)
            if not received:
                for pid in pids.values():
                    os.killpg(pid, signal.SIGKILL)
                return None
            *lines, pending = (pending + received).split(b"\n")
            for line in lines:
                wanted = json.loads(line)
                parent = os.getpid()
                try:
                    pid = os.fork()
                except OSError as error:
                    _send(connection, {"error": str(error)})
                    continue
                if pid == 0:
                    connection.close()
                    for other in pids:
                        os.close(other)
                    return _become(wanted, parent)
                pids[watch := os.pidfd_open(pid)] = pid
                poll.register(watch, select.POLLIN)
                _send(connection, {"started": pid})


def _become(wanted: dict[str, Any], parent: int) -> list[str]:
    """Turn this new process into the one that would have been spawned; return its command, tied to the server."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(wanted["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for target, source in enumerate((nothing, log, log)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(log)
    os.environ.clear()
    os.environ.update(wanted["environment"])
    command: list[str] = wanted["command"]
    if "--parent-pid" in command:
        command[command.index("--parent-pid") + 1] = str(parent)
    _show(command)
    return command


def _show(command: list[str]) -> None:
    """Put the command where the kernel keeps a process's own (proc(5), ``/proc/PID/cmdline``)."""
    values = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = int(values[45]), int(values[46])  # arg_start and arg_end, counted from behind the name
    if end > start:
        ctypes.memset(start, 0, end - start)
        text = "\0".join(command).encode()[: end - start - 1]
        ctypes.memmove(start, text, len(text))


def _reap(pid: int) -> int:
    """Kill the rest of a process's session; return its exit code, or minus the signal that ended it."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    with suppress(OSError):  # the other side is gone: the next recv() says so
        connection.sendall(json.dumps(message).encode() + b"\n")


def preload(modules: list[str]) -> bool:
    """Import the modules; return whether this process may be forked afterwards."""
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a fork would write to all objects, and so copy them
    return len(list(Path("/proc/self/task").iterdir())) == 1


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    die_with_parent(int(sys.argv[2]))
    _send(connection, {"usable": preload(sys.argv[3:-1])})
    command = serve(connection)
    if command is None:
        os._exit(0)  # there is nothing to put away
    run(command)


def run(command: list[str]) -> None:
    """Run a module's ``main()`` as ``python -P -m MODULE ARGUMENTS`` does."""
    atexit.register(gc.unfreeze)  # so that all is put away in the end
    module = importlib.import_module(command[3])
    sys.argv = [str(module.__file__), *command[4:]]
    module.main()


if __name__ == "__main__":
    main()
