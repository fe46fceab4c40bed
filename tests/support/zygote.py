"""One process that has loaded the engine for all tests; the deployments' fork servers are forked from it.

A deployment in the tests' own process then starts its instances and its gateway at once. What users start as a
program of its own (``epd-serve up``) and what is not to be forked is as it is without this.
"""

from __future__ import annotations

import array
import asyncio
import atexit
import ctypes
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NoReturn

import pytest

from epd_serve.launch import deployment
from epd_serve.launch.commands import HEAP_TUNABLES
from epd_serve.launch.processes import fork_server
from epd_serve.launch.processes.forking import ForkServer
from epd_serve.lifeline import die_with_parent

_MESSAGE_BYTES = 1 << 17
#: Above every number that a test's process has for a descriptor.
_HIGH = 4096
#: A variable that gives a fork server, and what it forks, a host of its own (hosts.py): namespaces for processes,
#: network, mounts, IPC and names.
OWN_HOST = "EPD_SERVE_TESTS_OWN_HOST"
_NEW_HOST = 0x2000_0000 | 0x4000_0000 | 0x0002_0000 | 0x0800_0000 | 0x0400_0000
_MS_REC_PRIVATE = 0x4000 | 0x4_0000
#: What gateways run, beside what a deployment's fork server has.
_OF_GATEWAYS = ("proxy.main",)


class _ForkedServer:
    """A fork server that the zygote has forked, as ``asyncio.subprocess.Process`` would be."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._pidfd, self._has_ended)

    def _has_ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        return 0

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


@contextmanager
def zygote() -> Iterator[None]:
    """Within, :class:`ForkServer` forks its servers instead of spawning them."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {"GLIBC_TUNABLES": HEAP_TUNABLES, **os.environ, "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        __file__,
        str(theirs.fileno()),
        str(os.getpid()),
        *deployment._PRELOADED,
        *_OF_GATEWAYS,
    ]
    with theirs:
        process = subprocess.Popen([*command, " " * 4096], env=environment, pass_fds=(theirs.fileno(),))

    async def spawn(server: ForkServer, connection: socket.socket) -> Any:
        if server._modules != deployment._PRELOADED:  # that of a model without weights
            return await ForkServer._spawn(server, connection)
        descriptors = [connection.fileno()]
        wanted = {
            "environment": server._environment,
            "log": os.fspath(server._log_file),
            "numbers": descriptors,
        }
        await asyncio.to_thread(socket.send_fds, ours, [json.dumps(wanted).encode()], descriptors)
        return _ForkedServer(int(await asyncio.to_thread(ours.recv, 64)))

    patch = pytest.MonkeyPatch()
    patch.setattr(deployment, "ForkServer", type("ZygoteForkServer", (ForkServer,), {"_spawn": spawn}))
    spec_of = deployment.gateway_spec
    patch.setattr(deployment, "gateway_spec", lambda *arguments: replace(spec_of(*arguments), can_fork=True))
    local, server_for = deployment.LocalDeployment, deployment.LocalDeployment._fork_server_for
    # one instance would not be worth a server; here it costs nothing
    patch.setattr(local, "_fork_server_for", lambda self, specs: server_for(self, [*specs, *specs]))
    try:
        yield
    finally:
        patch.undo()
        ours.close()
        process.wait(120)


def _serve(connection: socket.socket, usable: bool) -> None:
    parent = os.getpid()
    while True:
        data, ancillary, _, _ = connection.recvmsg(_MESSAGE_BYTES, socket.CMSG_SPACE(64 * 4))
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG if data else 0)[0]:
                pass
        if not data:
            os._exit(0)
        descriptors = array.array("i")
        for _, _, content in ancillary:
            descriptors.frombytes(content)
        wanted = json.loads(data)
        pid = os.fork()
        if pid == 0:
            connection.close()
            _become(wanted, list(descriptors), parent, usable)
            return
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(str(pid).encode())


def _become(wanted: dict[str, Any], descriptors: list[int], parent: int, usable: bool) -> None:
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _HIGH) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for source, number in zip(high, wanted["numbers"], strict=True):
        os.dup2(source, number)
        os.close(source)
    environment = {os.fsencode(name): os.fsencode(value) for name, value in wanted["environment"].items()}
    order = fork_server.Fork(command=[], environment=environment, log=os.fsencode(wanted["log"]))
    fork_server.become(order, parent)
    die_with_parent(parent)
    sys.path += filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if OWN_HOST in os.environ:
        _enter_host(os.environ[OWN_HOST])
    link = fork_server.orders_over(socket.socket(fileno=wanted["numbers"][0]))
    fork_server.tell(link, fork_server.Usable(usable))
    command = fork_server.serve(link)
    if command is None:
        os._exit(0)
    _run(command)


def _enter_host(name: str) -> None:
    """Returns in the first process of a new host, which ends with this one."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_HOST) or libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None):
        raise OSError(ctypes.get_errno(), "unshare")
    socket.sethostname(name)
    first = os.fork()
    if first:
        os.waitpid(first, 0)
        os._exit(0)
    die_with_parent(0)  # which is none of its namespace
    for kind, place in ((b"proc", b"/proc"), (b"tmpfs", b"/dev/shm")):
        if libc.mount(kind, place, kind, 0, None):
            raise OSError(ctypes.get_errno(), f"mount of {place.decode()}")


def _run(command: list[str]) -> NoReturn:
    """As a program, whose interpreter is not taken apart in the end."""
    code: Any = 1
    try:
        fork_server.run(command)
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:  # noqa: BLE001 - the interpreter's own last word
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    _serve(socket.socket(fileno=int(sys.argv[1])), fork_server.preload(sys.argv[3:-1]))
