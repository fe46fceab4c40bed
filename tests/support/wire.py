"""The wire between hosts: a process that passes IP packets between TUN devices.

``tc netem`` does this in the kernel, where a kernel has it. A share of the packets of each way may be lost. Over a
link that is not up packets vanish without a word, as they do when a cable is cut.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import random
import select
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CLONE_NEWNET = 0x4000_0000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x4004_54CA, 1, 0x1000
#: Less for each packet than for the bytes in it: the switch is a program.
MTU = 9000
_PACKET_BYTES = 65536
_ORDER_BYTES = 4096
#: Packets of one host before the others have their turn.
_BURST = 16


@dataclass(slots=True)
class Way:
    """One direction between two hosts."""

    loss: float = 0.0
    up: bool = True


class Wire:
    """The switch's process, as those who change its links have it."""

    def __init__(self) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-S", __file__, str(theirs.fileno())], pass_fds=(theirs.fileno(),)
            )

    def connect(self, address: str, device: int) -> None:
        """Connect a host, or the one that comes in another's place; closes the descriptor of its TUN device."""
        self._order({"connect": address}, [device])
        os.close(device)

    def set(self, source: str, target: str, **changes: float | bool) -> None:
        """Change fields of the :class:`Way` from one address to another."""
        self._order({"way": [source, target], "changes": changes})

    def close(self) -> None:
        self._orders.close()
        self._process.wait()

    def _order(self, order: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        socket.send_fds(self._orders, [json.dumps(order).encode()], descriptors)
        self._orders.recv(1)  # it is done


def tun(pid: int, name: str) -> int:
    """A descriptor of a new TUN device in the network namespace of a process. Raises OSError."""
    found: list[int | OSError] = []

    def make() -> None:
        try:
            with Path(f"/proc/{pid}/ns/net").open() as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            device = os.open("/dev/net/tun", os.O_RDWR)
            fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
        except OSError as error:
            found.append(error)
        else:
            found.append(device)

    thread = threading.Thread(target=make)  # a network is a thread's own
    thread.start()
    thread.join()
    if isinstance(found[0], OSError):
        raise found[0]
    return found[0]


def address_lines(address: str, name: str) -> list[str]:
    """Commands of ``ip -batch`` for a host's device: all hosts are on one network."""
    return ["link set lo up", f"addr add {address}/24 dev {name}", f"link set {name} mtu {MTU} up"]


class _Switch:
    """The other end of a :class:`Wire`."""

    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self._devices: dict[str, int] = {}
        self._address_of: dict[int, str] = {}
        self._ways: dict[tuple[str, str], Way] = {}
        self._chance = random.Random(1)

    def run(self) -> None:
        """Pass packets on until the other end is closed."""
        while True:
            for one in select.select([self._orders, *self._address_of], (), ())[0]:
                if one is self._orders:
                    data, devices, _, _ = socket.recv_fds(self._orders, _ORDER_BYTES, 1)
                    if not data:
                        return
                    self._obey(json.loads(data), devices)
                    self._orders.send(b"0")
                elif one in self._address_of:
                    self._take_all(one)

    def _obey(self, order: dict[str, Any], devices: list[int]) -> None:
        if "connect" in order:
            address = order["connect"]
            self._disconnect(self._devices.get(address, -1))
            os.set_blocking(devices[0], False)
            self._devices[address], self._address_of[devices[0]] = devices[0], address
            for other in self._devices.keys() - {address}:
                self._ways[address, other], self._ways[other, address] = Way(), Way()
        else:
            way = self._ways[order["way"][0], order["way"][1]]
            for name, value in order["changes"].items():
                setattr(way, name, value)

    def _disconnect(self, device: int) -> None:
        if self._address_of.pop(device, None) is not None:
            os.close(device)

    def _take_all(self, device: int) -> None:
        for _ in range(_BURST):
            try:
                packet = os.read(device, _PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:  # the device went with its host
                self._disconnect(device)
                return
            self._pass_on(self._address_of[device], packet)

    def _pass_on(self, source: str, packet: bytes) -> None:
        target = ".".join(map(str, packet[16:20]))
        way = self._ways.get((source, target))
        if packet[0] >> 4 != 4 or way is None or not way.up or self._chance.random() < way.loss:
            return
        with suppress(OSError):  # its host is gone
            os.write(self._devices[target], packet)


if __name__ == "__main__":
    _Switch(socket.socket(fileno=int(sys.argv[1]))).run()
