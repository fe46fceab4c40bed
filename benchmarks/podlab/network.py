"""The network of a cluster on one node: a link and an address for each pod, services and policies by nftables."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

_CLONE_NEWNET = 0x4000_0000
_NODE, _NEXT_HOP = "10.78.0.1", "169.254.1.1"
#: As the kernel writes them in /proc/net/tcp: a state, and the ends of 127.0.0.1 and ::1.
_LISTENS, _LOOPBACK = "0A", ("7F", "000001000000")


def is_possible() -> bool:
    """Whether this user and kernel allow namespaces with rules of nftables."""
    trial = ["unshare", "--net", "--mount", "nft", "add table ip trial"]
    return (
        os.geteuid() == 0
        and bool(shutil.which("nft"))
        and not subprocess.run(trial, capture_output=True).returncode
    )


def enter(pid: int) -> None:
    """Move this thread into the network of a process, where the sockets that it makes are."""
    with Path(f"/proc/{pid}/ns/net").open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


class Sandbox:
    """Namespaces for network, IPC and name, which last until it is closed or this process has ended."""

    def __init__(self, name: str) -> None:
        keep = 'echo "$1" > /proc/sys/kernel/hostname; ip link set lo up; echo; exec cat'
        command = ["unshare", "--net", "--ipc", "--uts", "sh", "-c", keep, "sh", name]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise OSError(f"no namespaces for {name}")
        self.pid = self._process.pid

    def run(self, *command: str, text: str = "") -> None:
        inside = ["nsenter", "-t", str(self.pid), "--net", *command]
        subprocess.run(inside, input=text, text=True, check=True)

    def close(self) -> None:
        with self._process:  # closes its pipes, which ends it
            pass

    def threads(self, count: int = 4) -> ThreadPoolExecutor:
        """Threads in this network."""
        return ThreadPoolExecutor(count, initializer=enter, initargs=(self.pid,))

    def listening(self) -> set[int]:
        """Ports of TCP on which something here listens for others."""
        lines = [
            line.split()
            for kind in ("tcp", "tcp6")
            for line in Path(f"/proc/{self.pid}/net/{kind}").read_text().splitlines()[1:]
        ]
        ends = [line[1].split(":") for line in lines if line[3] == _LISTENS]
        return {int(port, 16) for address, port in ends if not address.endswith(_LOOPBACK)}


@dataclass(frozen=True, kw_only=True)
class Access:
    """The traffic that a policy lets through to a pod.

    Attributes:
        sources: addresses; None: everybody's. port: None: all.
    """

    sources: tuple[str, ...] | None
    port: int | None


class Network:
    """The node. Addresses of pods are given once."""

    def __init__(self) -> None:
        self.node = Sandbox("node")
        self._addresses = iter(ipaddress.ip_network("10.78.1.0/24").hosts())
        self.node.run("ip", "addr", "add", f"{_NODE}/32", "dev", "lo")
        self.node.run("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")

    def attach(self, sandbox: Sandbox) -> str:
        """Give it a link; returns its address."""
        address = str(next(self._addresses))
        link = f"pod{address.rpartition('.')[2]}"
        here = [
            f"link add dev {link} type veth peer name eth0 netns {sandbox.pid}",
            f"addr add {_NEXT_HOP}/32 dev {link}",
            f"link set {link} up",
            f"route add {address}/32 dev {link} src {_NODE}",
        ]
        there = [
            f"addr add {address}/32 dev eth0",
            "link set eth0 up",
            f"route add {_NEXT_HOP}/32 dev eth0",
            f"route add default via {_NEXT_HOP}",
        ]
        self.node.run("ip", "-batch", "-", text="\n".join(here) + "\n")
        sandbox.run("ip", "-batch", "-", text="\n".join(there) + "\n")
        return address

    def program(
        self,
        services: Iterable[tuple[str, int, Sequence[tuple[str, int]]]],
        policies: Mapping[str, Sequence[Access]],
    ) -> None:
        """Replace all rules.

        Args:
            services: (address, port, where it leads to: address and port of each ready pod).
            policies: by the address of each pod that a policy selects.
        """
        lines = ["flush ruleset", "table ip cluster {"]
        lines.append("chain services { type nat hook prerouting priority dstnat;")
        for address, port, ends in services:
            numbered = ", ".join(f"{index} : {ip} . {target}" for index, (ip, target) in enumerate(ends))
            if numbered:
                choice = f"numgen random mod {len(ends)} map {{ {numbered} }}"
                lines.append(f"ip daddr {address} tcp dport {port} dnat ip addr . port to {choice}")
        lines.append("}")
        lines.append(
            "chain policies { type filter hook forward priority filter; ct state established,related accept"
        )
        for address, accesses in policies.items():
            for access in accesses:
                source = "" if access.sources is None else f"ip saddr {{ {', '.join(access.sources)} }}"
                port_ = "" if access.port is None else f"tcp dport {access.port}"
                if access.sources != ():
                    lines.append(f"ip daddr {address} {source} {port_} accept")
            lines.append(f"ip daddr {address} drop")
        lines += ["}", "}"]
        self.node.run("nft", "-f", "-", text="\n".join(lines) + "\n")

    def close(self) -> None:
        self.node.close()
