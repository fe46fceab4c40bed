"""A process with a slab that others read, led through a pipe.

It is here because a spawned process imports by name, and tests have none.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

from transports import fill, make_transport

from epd_serve.protocol.wire import Region

SLAB_BYTES = 800


def serve(kind: str, slab_bytes: int, connection: Connection) -> None:
    """Until killed, or the pipe's other end is gone."""
    transport = make_transport(kind)
    slab = transport.allocate("kv", slab_bytes)
    connection.send(slab.region)
    while True:
        try:
            offset, data = connection.recv()
        except EOFError:
            os._exit(0)
        fill(slab, offset, data)
        connection.send(None)


class Peer:
    """The test's end."""

    def __init__(self, kind: str, slab_bytes: int = SLAB_BYTES) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(kind, slab_bytes, theirs), daemon=True)
        self._process.start()
        theirs.close()  # so that a dead child ends the pipe
        self.region: Region = self._pipe.recv()

    def fill(self, offset: int, data: bytes) -> None:
        """Have the process write into its slab."""
        self._pipe.send((offset, data))
        answer: Any = self._pipe.recv()
        assert answer is None

    def signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Idempotent."""
        if self._process.is_alive():
            self.signal(signal.SIGKILL)
        self._process.join()
        self._pipe.close()
