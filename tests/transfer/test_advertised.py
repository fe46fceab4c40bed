"""Memory that is offered on every address of a machine, under one of them, at a port that a firewall knows."""

from __future__ import annotations

import os

from epd_serve.launch.processes.ports import free_port
from epd_serve.transfer.embedded import EmbeddedTransport


def test_peers_use_the_address_that_is_advertised() -> None:
    port = free_port("0.0.0.0")
    offering = EmbeddedTransport("0.0.0.0", "tcp", port=port, advertise="localhost")
    reading = EmbeddedTransport(path="tcp")
    try:
        there = offering.allocate("there", 4096)
        assert (there.region.host, there.region.port) == ("localhost", port)
        there.buffer[:] = sent = os.urandom(4096)
        here = bytearray(4096)
        reading.read(there.region, [(0, memoryview(here))])
        assert here == sent
    finally:
        reading.close()
        offering.close()
