"""Leases of an instance at the gateways that it joins by itself."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from urllib.parse import urlsplit

import msgspec

from epd_serve.errors import InstanceLost, ServeError
from epd_serve.rpc.http import HttpPool, HttpServer
from epd_serve.rpc.link import Link
from epd_serve.rpc.tls import TlsFiles

logger = logging.getLogger(__name__)

#: Interval of resolving the gateways' host names.
_RESOLVE_S = 5.0
#: Delay before asking an unreachable gateway again.
_RETRY_S = 0.2


async def join_all(
    admin_urls: Sequence[str],
    name: str,
    url: str,
    headers: Mapping[str, str],
    *,
    role: str | None = None,
    key: str | None = None,
    tls: TlsFiles | None = None,
) -> None:
    """Join the gateways at all addresses of these admin planes; leave them when cancelled.

    See :class:`Joining` for the arguments.
    """
    running: dict[tuple[str, str], asyncio.Task[None]] = {}
    try:
        while True:
            found = {(one, address) for one in admin_urls for address in await _addresses(one)}
            for gone in running.keys() - found:
                running.pop(gone).cancel()
            for new in found - running.keys():
                joining = Joining(new[0], name, url, headers, role=role, key=key, tls=tls, address=new[1])
                running[new] = asyncio.create_task(joining.run())
            await asyncio.sleep(_RESOLVE_S)
    finally:
        for task in running.values():
            task.cancel()
        await asyncio.gather(*running.values(), return_exceptions=True)


async def _addresses(url: str) -> set[str]:
    """Return the addresses of the URL's host if there are several, else its name."""
    parts = urlsplit(url)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            parts.hostname, parts.port or 80, type=socket.SOCK_STREAM
        )
    except (OSError, UnicodeError):
        return {parts.hostname or ""}
    addresses = {str(at[0]) for _, _, _, _, at in found}
    return {parts.hostname or ""} if len(addresses) < 2 or parts.hostname == "localhost" else addresses


class Joining:
    """An instance's lease at one gateway's admin plane.

    Args:
        name, url: of the instance.
        headers: for the admin plane, such as its key.
        role: of an instance that the gateway cannot ask for it.
        key: the cluster key, proved over a link in place of ``headers``.
        tls: for an admin plane at https.
        address: which of the host name's addresses to call.
        lease_s: lifetime of the lease, renewed every third of it. A renewal may take as long.
    """

    def __init__(
        self,
        admin_url: str,
        name: str,
        url: str,
        headers: Mapping[str, str],
        *,
        role: str | None = None,
        key: str | None = None,
        tls: TlsFiles | None = None,
        address: str | None = None,
        lease_s: float = 10.0,
    ) -> None:
        self._link = None if key is None else Link("gateway", admin_url, key, "admin", tls=tls, address=address)
        self._pool = HttpPool(tls)
        self._gateway = HttpServer("gateway", admin_url, self._pool, address=address)
        self._url = self._gateway.url + "/instances"
        incarnation = time.time_ns()
        body = {"name": name, "url": url, "lease_s": lease_s, "incarnation": incarnation}
        self._body = msgspec.json.encode(body if role is None else body | {"role": role})
        self._own_path = f"/instances/{name}?incarnation={incarnation}"
        self._headers = {**headers, "content-type": "application/json"}
        self._lease_s = lease_s
        #: Whether the gateway granted a lease, or may have without its answer arriving.
        self._may_have_lease = False

    async def run(self) -> None:
        """Join, retrying forever, and renew the lease; leave when cancelled."""
        problem = ""
        try:
            while True:
                before, (problem, pause_s) = problem, await self._renew()
                if problem != before:
                    logger.warning("%s", problem) if problem else logger.info("joined %s", self._url)
                await asyncio.sleep(pause_s)
        finally:
            if self._may_have_lease:
                with suppress(ServeError, TimeoutError):
                    await self._ask("DELETE", self._own_path, "/leave")
                    logger.info("left %s", self._url)
            await self._pool.__aexit__()
            if self._link is not None:
                await self._link.close()

    async def _renew(self) -> tuple[str, float]:
        """Return the problem, if any, and when to ask again."""
        self._may_have_lease = True
        try:
            await self._ask("POST", "/instances", "/join")
        except (InstanceLost, TimeoutError) as error:
            return f"{self._url} does not answer: {error or type(error).__name__}", _RETRY_S
        except ServeError as error:
            self._may_have_lease = False
            return f"{self._url} answered {error.status}: {error.message[:300]}", self._lease_s / 3
        return "", self._lease_s / 3

    async def _ask(self, method: str, path: str, call: str) -> None:
        async with asyncio.timeout(self._lease_s / 3):
            if self._link is not None:
                await self._link.ask(call, [self._body])
            else:
                await self._gateway.ask(method, path, self._body if method == "POST" else b"", self._headers)
