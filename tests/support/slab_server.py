"""A process with a slab. It is here because a spawned process imports by name, and tests have none."""

from __future__ import annotations

from multiprocessing.connection import Connection

from epd_serve.protocol import wire
from epd_serve.transfer.embedded import EmbeddedTransport, Path

SIZE = 4096


def serve_slab(path: Path, connection: Connection) -> None:
    """Offer a slab that begins with "hello" until killed."""
    transport = EmbeddedTransport(path=path)
    slab = transport.allocate("remote", SIZE)
    slab.buffer[:5] = b"hello"
    connection.send_bytes(wire.encode(slab.region))
    connection.recv_bytes()
    connection.send_bytes(bytes(slab.buffer[:16]))
