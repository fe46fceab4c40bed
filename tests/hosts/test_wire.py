"""The wire between hosts is as slow, as lossy and as broken as it is told to be."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hosts import Hosts, hosts

PACKETS = 200


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Hosts]:
    async with hosts(["a", "b"], tmp_path) as made:
        yield made


@pytest.fixture
def datagrams(lab: Hosts) -> Iterator[list[socket.socket]]:
    """A socket on each host."""
    made = []
    for name in ("a", "b"):
        made.append(lab[name].run(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)))
        made[-1].bind((lab[name].ip, 5000))
        made[-1].settimeout(0.5)
    yield made
    for one in made:
        one.close()


def _arrive(ours: socket.socket, theirs: socket.socket, ip: str) -> int:
    for _ in range(PACKETS):
        ours.sendto(b"x", (ip, 5000))
        time.sleep(0.0005)
    arrived = 0
    try:
        while theirs.recv(16):
            arrived += 1
    except TimeoutError:
        return arrived
    return arrived


async def test_delay_loss_and_cuts(lab: Hosts, datagrams: list[socket.socket]) -> None:
    a, b = datagrams
    lab.shape(delay_s=0.02)
    trips = []
    for _ in range(5):
        began = time.monotonic()
        a.sendto(b"there", (lab["b"].ip, 5000))
        b.recv(16)
        b.sendto(b"back", (lab["a"].ip, 5000))
        a.recv(16)
        trips.append(time.monotonic() - began)
    assert 0.04 <= min(trips) < 0.1
    lab.shape(delay_s=0.0)
    assert _arrive(a, b, lab["b"].ip) == PACKETS
    lab.shape(loss=0.25)
    assert 0.5 * PACKETS < _arrive(a, b, lab["b"].ip) < 0.95 * PACKETS
    lab.shape(loss=0.0)
    lab.cut("a", "b")
    assert _arrive(a, b, lab["b"].ip) == 0
    lab.mend("a", "b")
    lab.wire.set(lab["b"].ip, lab["a"].ip, up=False)
    assert _arrive(a, b, lab["b"].ip) == PACKETS, "the other way is cut alone"
    lab.power_off("b")
    assert _arrive(a, b, lab["b"].ip) == 0, "nothing comes, and nothing says so"


async def test_rate(lab: Hosts) -> None:
    rate_bps, size = 80e6, 4 << 20
    lab.shape(rate_bps=rate_bps)
    with lab["b"].run(lambda: socket.create_server((lab["b"].ip, 5000))) as listener:
        sender = lab["a"].run(lambda: socket.create_connection((lab["b"].ip, 5000)))
        receiver, _ = listener.accept()
        sending = threading.Thread(target=sender.sendall, args=(bytes(size),))
        began = time.monotonic()
        sending.start()
        left = size
        while left:
            left -= len(receiver.recv(1 << 20))
        took_s = time.monotonic() - began
        sending.join()
        sender.close()
        receiver.close()
    assert size * 8 / took_s < 1.1 * rate_bps, "a busy machine may be slower, and none is faster"
