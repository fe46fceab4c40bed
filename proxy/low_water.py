"""Large bodies are read in few pieces: the system says that something has come when it is enough of it.

A body that comes as fast as the network has it would wake this process up for each few packets (SO_RCVLOWAT,
socket(7) and tcp(7)). The end of a connection is told at once in any case.
"""

from __future__ import annotations

import asyncio
import socket

#: So much is waited for, while it is still to come: the system has to hold it meanwhile.
MARK_BYTES = 256 * 1024


class LowWater:
    """Of one connection."""

    __slots__ = ("_mark", "_socket")

    def __init__(self, transport: asyncio.BaseTransport) -> None:
        own: socket.socket | None = transport.get_extra_info("socket")
        is_plain = own is not None and own.family in (socket.AF_INET, socket.AF_INET6)
        self._socket = own if is_plain and transport.get_extra_info("sslcontext") is None else None
        self._mark = 1

    def expect(self, nbytes: int) -> None:
        """So many bytes are still to come, for certain; none where it is not above 0. Any number of times."""
        mark = MARK_BYTES if nbytes >= MARK_BYTES else 1
        if mark != self._mark and self._socket is not None:
            self._mark = mark
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, mark)
