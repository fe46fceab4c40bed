"""Leases of an instance at the gateways it joins by itself."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
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

    See :func:`keep_lease` for the arguments. Raises ValueError for an invalid URL.
    """
    running: dict[tuple[str, str], asyncio.Task[None]] = {}
    try:
        async with asyncio.TaskGroup() as tasks:
            while True:
                found = set[tuple[str, str]]()
                for one in admin_urls:
                    before = {address for admin_url, address in running if admin_url == one}
                    found |= {(one, address) for address in await _addresses(one) or before or _name(one)}
                for gone in running.keys() - found:
                    running.pop(gone).cancel()
                for admin_url, address in found - running.keys():
                    lease = keep_lease(admin_url, name, url, headers, role=role, key=key, tls=tls, address=address)
                    running[admin_url, address] = tasks.create_task(lease)
                await asyncio.sleep(_RESOLVE_S)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def _name(url: str) -> set[str]:
    return {urlsplit(url).hostname or ""}


async def _addresses(url: str) -> set[str]:
    """Return the addresses of the URL's host, empty if they are not known now; the name of localhost."""
    parts = urlsplit(url)
    if parts.hostname == "localhost":
        return _name(url)
    with suppress(OSError, UnicodeError):
        found = await asyncio.get_running_loop().getaddrinfo(
            parts.hostname, parts.port or 80, type=socket.SOCK_STREAM
        )
        return {str(at[0]) for _, _, _, _, at in found}
    return set()


async def keep_lease(
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
    """Join one gateway, retrying forever, and renew the instance's lease; leave when cancelled.

    Args:
        name, url: the instance's name and URL.
        headers: headers for the admin plane, such as its key.
        role: the instance's role, if the gateway cannot ask for it.
        key: the cluster key, proved over a link instead of sending ``headers``.
        tls: files for an admin plane at https.
        address: the host name's address to call.
        lease_s: lifetime of the lease, renewed every third of it. A renewal may take as long.
    """
    incarnation = time.time_ns()
    fields = {"name": name, "url": url, "lease_s": lease_s, "incarnation": incarnation}
    body = msgspec.json.encode(fields if role is None else fields | {"role": role})
    async with AsyncExitStack() as stack:
        if key is not None:
            link = await stack.enter_async_context(
                Link("gateway", admin_url, key, "admin", tls=tls, address=address)
            )
            join, leave = partial(link.ask, "/join", [body]), partial(link.ask, "/leave", [body])
        else:
            pool = await stack.enter_async_context(HttpPool(tls))
            ask = HttpServer("gateway", admin_url, pool, address=address).ask
            headers = {**headers, "content-type": "application/json"}
            join = partial(ask, "POST", "/instances", body, headers)
            leave = partial(ask, "DELETE", f"/instances/{name}?incarnation={incarnation}", b"", headers)
        may_have_lease, problem = False, ""
        try:
            while True:
                before, problem, pause_s = problem, "", lease_s / 3
                may_have_lease = True  # even if the answer does not arrive
                try:
                    async with asyncio.timeout(lease_s / 3):
                        await join()
                except (InstanceLost, TimeoutError) as error:
                    problem, pause_s = f"does not answer: {error or type(error).__name__}", _RETRY_S
                except ServeError as error:
                    problem, may_have_lease = f"answered {error.status}: {error.message[:300]}", False
                if problem != before and problem:
                    logger.warning("%s/instances %s", admin_url, problem)
                elif problem != before:
                    logger.info("joined %s", admin_url)
                await asyncio.sleep(pause_s)
        finally:
            if may_have_lease:
                with suppress(ServeError, TimeoutError):
                    async with asyncio.timeout(lease_s / 3):
                        await leave()
                    logger.info("left %s", admin_url)
