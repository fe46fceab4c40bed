"""Notices (:mod:`epd_serve.protocol.engine_notices`) from the gateway to the connectors of vLLM instances."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from epd_serve.backends.native import NativeConnections
from epd_serve.errors import InstanceLost
from epd_serve.protocol.engine_notices import LENGTH, Notice, pack
from epd_serve.rpc.sockets import connect

_TIMEOUT_S = 5.0


class Notices:
    """The notices to one instance's connector."""

    def __init__(self, connections: NativeConnections, name: str, address: str) -> None:
        """``name`` is the instance's; ``address`` is ``host:port``."""
        self._connections = connections
        self._name = name
        self._address = address
        self._waiting: list[Notice] = []
        self._is_telling = False

    async def ask(self, *notices: Notice) -> None:
        """Send notices over one connection; return when all are answered. Raises InstanceLost where that fails."""
        host, _, port = self._address.rpartition(":")
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(sock=await connect(host, int(port)))
                try:
                    writer.write(b"".join(map(pack, notices)))
                    for _ in notices:
                        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                        await reader.readexactly(length)
                finally:
                    writer.close()
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            raise InstanceLost(f"instance {self._name} takes no notices at {self._address} ({error})") from error

    def tell(self, notice: Notice) -> None:
        """Send a notice soon, together with others, without an answer; a failure is not reported."""
        self._waiting.append(notice)
        if not self._is_telling:
            self._is_telling = True
            self._connections.run(self._tell_all())

    async def _tell_all(self) -> None:
        try:
            while self._waiting:
                notices, self._waiting = self._waiting, []
                with suppress(InstanceLost):
                    await self.ask(*notices)
        finally:
            self._is_telling = False
