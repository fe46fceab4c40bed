"""Ports for servers of tests that are started a while after their port was chosen.

The system gives the ports of its own range to whoever asks next: to a server of the tests in the other process,
while ours is still loading. These lie below that range, with a part for each of pytest-xdist's processes, and
below the ports that Mooncake's transfer engines take at random, and those that programs choose by themselves.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from epd_serve.launch.processes import ports
from epd_serve.rpc.sockets import listen

_LOWEST, _EACH = 10_240, 2_300
#: The first of Mooncake's; above these are those of :mod:`epd_serve.launch.processes.ports` outside of the tests.
_END = 15_000
_SYSTEMS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port(host: str) -> int:
    """Return a port found free a moment ago."""
    while True:
        port = ports.draw_port(1)
        try:
            listen(host, port, "a test").close()
        except ValueError:
            continue
        return port


@contextmanager
def own_ports() -> Iterator[None]:
    """Within, port 0 of :mod:`epd_serve.launch.processes.ports` stands for one of ours."""
    begin = _LOWEST + _EACH * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    if begin + _EACH > min(_END, int(_SYSTEMS.read_text().split()[0])):
        yield
        return
    ours = itertools.cycle(range(begin, begin + _EACH))
    for _ in range(random.randrange(_EACH)):  # other runs on this machine choose too
        next(ours)

    def draw(count: int) -> int:
        first, *_ = (next(ours) for _ in range(count))
        return first

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ports, "draw_port", draw)
        yield
