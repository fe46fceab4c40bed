"""Hosts on one machine: each has network, process, mount and IPC namespaces of its own; a router stands between.

Links are cut without a word, as a cable is: packets vanish in the router, and nobody gets a reset.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from zygote import OWN_HOST

from epd_serve.launch import deployment
from epd_serve.launch.commands import HEAP_TUNABLES
from epd_serve.launch.forking import ForkServer
from epd_serve.launch.process import ProcessSpec, RunningProcess

T = TypeVar("T")
_CLONE_NEWNET = 0x4000_0000


@dataclass
class Host:
    """One machine. ``pid`` is its first process, as its namespaces are named here."""

    name: str
    ip: str
    pid: int
    server: ForkServer
    log_dir: Path

    async def start(self, name: str, command: Sequence[str], **environment: str) -> RunningProcess:
        """Run ``python -P -m MODULE ARGUMENTS`` on it; ``command`` is from MODULE on."""
        spec = ProcessSpec(
            name=name,
            label=name,
            command=("python", "-P", "-m", *command),
            environment={"GLIBC_TUNABLES": HEAP_TUNABLES, **os.environ, "OMP_NUM_THREADS": "1", **environment},
            url="",
        )
        return await self.server.fork(spec, self.log_dir / f"{name}.log")

    def terminate(self, process: RunningProcess) -> None:
        """Send SIGTERM there: its number is that of the host's own namespace."""
        command = ["nsenter", "-t", str(self.pid), "--pid", "kill", "-TERM", str(process.pid)]
        subprocess.run(command, check=True)

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
    """Hosts by their names, and the router between them."""

    def __init__(self, hosts: dict[str, Host], router: Host) -> None:
        self._hosts = hosts
        self._router = router

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def cut(self, one: str, other: str) -> None:
        """No packet between two hosts arrives any more."""
        self._order(_between("add", self[one], self[other]))

    def mend(self, one: str, other: str) -> None:
        self._order(_between("del", self[one], self[other]))

    def isolate(self, name: str) -> None:
        """No packet of a host arrives any more, nor one that is for it."""
        self._order(_around("add", self[name]))

    def bring_back(self, name: str) -> None:
        self._order(_around("del", self[name]))

    def power_off(self, name: str) -> None:
        """All that runs there is gone, and nobody hears of it."""
        self.isolate(name)
        self[name].server.kill()

    def _order(self, lines: Iterable[str]) -> None:
        _ip(self._router.pid, lines)


@asynccontextmanager
async def hosts(names: Sequence[str], log_dir: Path) -> AsyncIterator[Hosts]:
    """Within, hosts of these names that all see each other. Skips the test where they cannot be made."""
    if not _can_be_made():
        pytest.skip("hosts are made of namespaces, which takes root and a kernel that allows it")
    async with AsyncExitStack() as stack:
        made: dict[str, Host] = {}
        for index, name in enumerate(["router", *names]):
            environment = {"GLIBC_TUNABLES": HEAP_TUNABLES, **os.environ, OWN_HOST: name}
            server = deployment.ForkServer(deployment._PRELOADED, environment, log_dir / f"{name}.host.log")
            await server.start()
            stack.push_async_callback(server.close)
            stack.callback(server.kill)
            process: Any = server._process
            assert server._usable is not None
            assert await server._usable, "a host could not be made"
            made[name] = Host(name, f"10.77.{index}.2", _child_of(process.pid), server, log_dir)
        router = made.pop("router")
        _ip(router.pid, _wires(made.values()))
        for host in made.values():
            gateway = host.ip.removesuffix("2") + "1"
            _ip(host.pid, ["link set lo up", f"addr add {host.ip}/24 dev net0", "link set net0 up"])
            _ip(host.pid, [f"route add default via {gateway}"])
        _in_network(router.pid, ["sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"])
        yield Hosts(made, router)


def _can_be_made() -> bool:
    trial = ["unshare", "--net", "--pid", "--fork", "true"]
    return os.geteuid() == 0 and subprocess.run(trial, stderr=subprocess.DEVNULL).returncode == 0


def _child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def _wires(hosts: Iterable[Host]) -> list[str]:
    """From the router to each host."""
    lines = []
    for index, host in enumerate(hosts):
        lines += [
            f"link add dev wire{index} type veth peer name net0 netns {host.pid}",
            f"addr add {host.ip.removesuffix('2')}1/24 dev wire{index}",
            f"link set wire{index} up",
        ]
    return lines


def _between(verb: str, one: Host, other: Host) -> list[str]:
    return [f"rule {verb} from {a.ip} to {b.ip} blackhole" for a, b in ((one, other), (other, one))]


def _around(verb: str, host: Host) -> list[str]:
    return [f"rule {verb} {way} {host.ip} blackhole" for way in ("from", "to")]


def _ip(pid: int, lines: Iterable[str]) -> None:
    _in_network(pid, ["ip", "-batch", "-"], "\n".join(lines) + "\n")


def _in_network(pid: int, command: list[str], text: str = "") -> None:
    subprocess.run(["nsenter", "-t", str(pid), "--net", *command], input=text, text=True, check=True)
