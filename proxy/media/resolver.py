"""Resolve media servers and classify addresses, against server-side request forgery.

Each lookup has its own thread, so that a silent resolver blocks no other work.
"""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import Future
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from threading import Thread
from typing import Any

from aiohttp.abc import AbstractResolver, ResolveResult

Address = IPv4Address | IPv6Address

#: IPv4 addresses mapped into IPv6-only networks (RFC 6052).
_NAT64 = IPv6Network("64:ff9b::/96")
#: IPv6 addresses of the internet (RFC 4291, section 2.4).
_GLOBAL_UNICAST = IPv6Network("2000::/3")


def parse_address(text: str) -> Address:
    """Parse an address from ``getaddrinfo``, with or without a scope. Raises ValueError."""
    return ip_address(text.partition("%")[0])


def is_public(address: Address) -> bool:
    """Return whether this is a public unicast address; a mapped, NAT64 or 6to4 address counts as its IPv4 one."""
    if isinstance(address, IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            inner = IPv4Address(int(address) & 0xFFFF_FFFF)
        if inner is not None:
            return is_public(inner)
        if address not in _GLOBAL_UNICAST:
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


#: Concurrent lookups, including abandoned ones: the resolver may take half a minute and cannot be cancelled.
MAX_LOOKUPS = 32
TIMEOUT_S = 5.0


class Lookups(AbstractResolver):
    """The system's resolver, with hosts file and search domains."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(MAX_LOOKUPS)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the addresses of a name. Raises OSError, such as TimeoutError."""
        loop, found = asyncio.get_running_loop(), Future[list[Any]]()
        found.set_running_or_notify_cancel()  # a lookup cannot be cancelled
        async with asyncio.timeout(TIMEOUT_S):
            await self._free.acquire()
            Thread(target=self._look_up, args=(loop, found, host, port, family), daemon=True).start()
            addresses = await asyncio.wrap_future(found)
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
        """Do nothing: open lookups end by themselves."""

    def _look_up(
        self,
        loop: asyncio.AbstractEventLoop,
        found: Future[list[Any]],
        host: str,
        port: int,
        family: socket.AddressFamily,
    ) -> None:
        kind, flags = socket.SOCK_STREAM, socket.AI_ADDRCONFIG
        try:
            found.set_result(socket.getaddrinfo(host, port, family=family, type=kind, flags=flags))
        except (OSError, ValueError) as error:  # ValueError: invalid name
            found.set_exception(error if isinstance(error, OSError) else OSError(str(error)))
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(self._free.release)
