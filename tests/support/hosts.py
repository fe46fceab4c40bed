"""Hosts on one machine: each has network, process, mount and IPC namespaces of its own, on one wire."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import Any, TypeVar

import pytest
from wire import Wire, address_lines, tun

from epd_serve.launch.processes.forking import HEAP_TUNABLES

T = TypeVar("T")
_CLONE_NEWNET = 0x4000_0000


@dataclass
class Host:
    """One machine. ``pid`` is its first process, as its namespaces are named here."""

    name: str
    ip: str
    pid: int
    log_dir: Path
    started: list[asyncio.subprocess.Process] = field(default_factory=list)

    async def start(self, name: str, command: Sequence[str], **environment: str) -> asyncio.subprocess.Process:
        """Run ``python -P -m MODULE ARGUMENTS`` on it; ``command`` is from MODULE on."""
        enter = ("nsenter", "-t", str(self.pid), "--net", "--pid", "--mount", "--ipc", "--uts", "--time")
        with (self.log_dir / f"{name}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *(*enter, sys.executable, "-P", "-m", *command),
                stdout=log,
                stderr=log,
                env={"GLIBC_TUNABLES": HEAP_TUNABLES, **os.environ, "OMP_NUM_THREADS": "1", **environment},
            )
        self.started.append(process)
        return process

    def terminate(self, process: asyncio.subprocess.Process) -> None:
        """Send SIGTERM to the program; nsenter waits for it."""
        os.kill(_child_of(process.pid), signal.SIGTERM)

    def run(self, call: Callable[[], T]) -> T:
        """Call a function of this process in the host's network, where the sockets that it makes stay."""

        def enter() -> None:
            with Path(f"/proc/{self.pid}/ns/net").open() as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")

        with ThreadPoolExecutor(1, initializer=enter) as thread:  # a network is a thread's own
            return thread.submit(call).result()

    def socket(self, info: Sequence[Any]) -> socket.socket:
        """A socket for a row of getaddrinfo()."""
        return self.run(lambda: socket.socket(info[0], info[1], info[2]))


class Hosts:
    """Hosts by their names, and the wire between them."""

    def __init__(self, hosts: dict[str, Host], wire: Wire) -> None:
        self._hosts = hosts
        self.wire = wire

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def shape(self, **changes: float | bool) -> None:
        """Have all ways between hosts like this."""
        for one, other in permutations(self._hosts.values(), 2):
            self.wire.set(one.ip, other.ip, **changes)

    def cut(self, one: str, other: str) -> None:
        """No packet between two hosts arrives any more."""
        self._link(one, other, up=False)

    def mend(self, one: str, other: str) -> None:
        self._link(one, other, up=True)

    def isolate(self, name: str) -> None:
        """No packet of a host arrives any more, nor one that is for it."""
        for other in self._hosts.keys() - {name}:
            self.cut(name, other)

    def bring_back(self, name: str) -> None:
        for other in self._hosts.keys() - {name}:
            self.mend(name, other)

    def power_off(self, name: str) -> None:
        """All that runs there is gone, and nobody hears of it."""
        self.isolate(name)
        os.kill(self[name].pid, signal.SIGKILL)

    def _link(self, one: str, other: str, **changes: bool) -> None:
        for a, b in ((one, other), (other, one)):
            self.wire.set(self[a].ip, self[b].ip, **changes)


@asynccontextmanager
async def hosts(names: Sequence[str], log_dir: Path) -> AsyncIterator[Hosts]:
    """Within, hosts of these names that all see each other. Skips the test where they cannot be made."""
    if not _can_be_made():
        pytest.skip("hosts are made of namespaces, which takes root, /dev/net/tun and a kernel that allows it")
    async with AsyncExitStack() as stack:
        wire = Wire()
        stack.callback(wire.close)
        made: dict[str, Host] = {}
        for index, name in enumerate(names, start=1):
            first = f"mount -t tmpfs tmpfs /dev/shm; hostname {name}; echo; exec sleep infinity"
            process = await asyncio.create_subprocess_exec(
                *("unshare", "--net", "--pid", "--mount", "--ipc", "--uts", "--fork", "--kill-child"),
                *("--time", "--monotonic", str(1000 * index)),  # as on machines that started at different times
                *("--mount-proc", "sh", "-c"),
                first,
                stdout=asyncio.subprocess.PIPE,
            )
            assert process.stdout is not None
            assert await process.stdout.readline(), "a host could not be made"
            host = Host(name, f"10.77.0.{index}", _child_of(process.pid), log_dir)
            wire.connect(host.ip, tun(host.pid, "net0"))
            lines = "\n".join(address_lines(host.ip, "net0"))
            enter = ["nsenter", "-t", str(host.pid), "--net", "ip", "-batch", "-"]
            subprocess.run(enter, input=lines, text=True, check=True)  # noqa: ASYNC221
            made[name] = host
            stack.push_async_callback(_ended, host, process)
        yield Hosts(made, wire)


async def _ended(host: Host, first: asyncio.subprocess.Process) -> None:
    """End a host with all that was started on it."""
    with suppress(ProcessLookupError):  # it lost power in the test
        first.kill()
    await asyncio.gather(first.wait(), *(process.wait() for process in host.started))


def _can_be_made() -> bool:
    trial = ["unshare", "--net", "--pid", "--fork", "true"]
    return (
        os.geteuid() == 0
        and Path("/dev/net/tun").exists()
        and subprocess.run(trial, stderr=subprocess.DEVNULL).returncode == 0
    )


def _child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
