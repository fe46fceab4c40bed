"""Names of media servers, looked up in threads of their own: a resolver that is silent holds up nobody else's."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from threading import Thread
from typing import Any

from aiohttp.abc import AbstractResolver, ResolveResult

#: Of one asker. The system's resolver may take half a minute for a name whose server is silent, and cannot be
#: told to stop; what it still looks up counts.
MAX_LOOKUPS = 32
#: How long a request waits for an address.
TIMEOUT_S = 5.0


class Lookups(AbstractResolver):
    """The system's resolver (hosts file, search domains and all) for one asker."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(MAX_LOOKUPS)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Addresses of a name. Raises OSError, of which TimeoutError is one."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(TIMEOUT_S):
            await self._free.acquire()
            found: asyncio.Future[list[Any]] = loop.create_future()
            Thread(target=self._look_up, args=(loop, found, host, port, family), daemon=True).start()
            addresses = await found
        return [
            {
                "hostname": host,
                "host": address[0],
                "port": address[1],
                "family": kind,
                "proto": protocol,
                "flags": socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            }
            for kind, _, protocol, _, address in addresses
        ]

    async def close(self) -> None:
        """Lookups in progress end by themselves."""

    def _look_up(
        self,
        loop: asyncio.AbstractEventLoop,
        found: asyncio.Future[list[Any]],
        host: str,
        port: int,
        family: socket.AddressFamily,
    ) -> None:
        result: list[Any] | Exception
        try:
            result = socket.getaddrinfo(
                host, port, family=family, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
            )
        except (OSError, ValueError) as error:  # ValueError: no name at all
            result = error if isinstance(error, OSError) else OSError(str(error))
        with suppress(RuntimeError):  # the loop has ended in the meantime
            loop.call_soon_threadsafe(self._looked_up, found, result)

    def _looked_up(self, found: asyncio.Future[list[Any]], result: list[Any] | Exception) -> None:
        self._free.release()
        if found.done():
            return
        if isinstance(result, Exception):
            found.set_exception(result)
        else:
            found.set_result(result)
