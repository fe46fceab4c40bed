"""A process that has loaded what instances run, and forks them: they start at once and share that memory.

``python -P -m epd_serve.launch.processes.fork_server FD PARENT_PID MODULE... ROOM`` imports the modules, tells on
the inherited socket whether it can be forked, and then takes an order for each process. The last argument is room
in which these write what they run, for ps to show. Its processes end with it, and it ends with the process that
started it. :mod:`epd_serve.launch.processes.forking` is the other side.

A fork is safe here because the server never computes: it has one thread, and no device is opened in it. Where an
import starts a thread (a CUDA driver's, say), the server says so and is not used.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from epd_serve.lifeline import die_with_parent
from epd_serve.rpc.link import Link, LinkClosed


class Fork(msgspec.Struct, frozen=True, kw_only=True):
    """The order for a process, in the system's bytes; answered by :class:`Started` or :class:`NotStarted`."""

    command: list[bytes]
    environment: dict[bytes, bytes]
    log: bytes


class Usable(msgspec.Struct, frozen=True, tag=True):
    """The server has imported its modules; ``yes``: it can be forked."""

    yes: bool


class Started(msgspec.Struct, frozen=True, tag=True):
    pid: int


class NotStarted(msgspec.Struct, frozen=True, tag=True):
    reason: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A process has ended with this exit code, or minus the signal that ended it."""

    pid: int
    code: int


News = Usable | Started | NotStarted | Ended
_ORDERS: msgspec.msgpack.Decoder[Fork] = msgspec.msgpack.Decoder(Fork)


def orders_over(connection: socket.socket) -> Link[Fork]:
    """The server's end of the link."""
    return Link(connection, _ORDERS)


def serve(link: Link[Fork]) -> list[str] | None:
    """Fork processes until the other side is gone.

    Returns twice, as fork does: in a new process its command, and in the server, with all processes killed, None.
    """
    poll, pids = select.poll(), dict[int, int]()
    poll.register(link, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor in pids:
                poll.unregister(descriptor)
                tell(link, Ended(pids[descriptor], _reap(pids.pop(descriptor))))
                os.close(descriptor)
                continue
            try:
                orders = link.read()
            except LinkClosed:
                for pid in pids.values():
                    os.killpg(pid, signal.SIGKILL)
                return None
            for order in orders:
                parent = os.getpid()
                try:
                    pid = os.fork()
                except OSError as error:
                    tell(link, NotStarted(str(error)))
                    continue
                if pid == 0:
                    os.close(link.detach())
                    for other in pids:
                        os.close(other)
                    return become(order, parent)
                pids[watch := os.pidfd_open(pid)] = pid
                poll.register(watch, select.POLLIN)
                tell(link, Started(pid))


def become(order: Fork, parent: int) -> list[str]:
    """Turn this new process into the one that would have been spawned; return its command, tied to the server."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(order.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for target, source in enumerate((nothing, log, log)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(log)
    os.environb.clear()
    os.environb.update(order.environment)
    command = [os.fsdecode(one) for one in order.command]
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
        text = os.fsencode("\0".join(command))[: end - start - 1]
        ctypes.memmove(start, text, len(text))


def _reap(pid: int) -> int:
    """Kill the rest of a process's session; return its exit code, or minus the signal that ended it."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def tell(link: Link[Fork], news: News) -> None:
    with suppress(LinkClosed):  # the next read() says so
        link.send(news)


def preload(modules: list[str]) -> bool:
    """Import the modules; return whether this process may be forked afterwards."""
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a fork would write to all objects, and so copy them
    return len(list(Path("/proc/self/task").iterdir())) == 1


def main() -> None:
    link = orders_over(socket.socket(fileno=int(sys.argv[1])))
    die_with_parent(int(sys.argv[2]))
    tell(link, Usable(preload(sys.argv[3:-1])))
    command = serve(link)
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
