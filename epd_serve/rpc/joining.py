"""An instance's place at a gateway that it joins by itself."""

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
from epd_serve.rpc.http import HttpCall, HttpPool

logger = logging.getLogger(__name__)

#: Between two looks at which gateways a name has.
_LOOK_S = 5.0


async def join_all(
    admin_urls: Sequence[str],
    name: str,
    url: str,
    headers: Mapping[str, str],
    *,
    role: str | None = None,
    key: str | None = None,
) -> None:
    """Be at every gateway of these admin planes, where a host name has several at all of its addresses; leave when
    cancelled. Arguments as of :class:`Joining`."""
    running: dict[str, asyncio.Task[None]] = {}
    try:
        while True:
            found = set().union(*[await _addresses(one) for one in admin_urls])
            for gone in running.keys() - found:
                running.pop(gone).cancel()
            for new in found - running.keys():
                joining = Joining(new, name, url, headers, role=role, key=key)
                running[new] = asyncio.create_task(joining.run())
            await asyncio.sleep(_LOOK_S)
    finally:
        for task in running.values():
            task.cancel()
        await asyncio.gather(*running.values(), return_exceptions=True)


async def _addresses(url: str) -> set[str]:
    """The URL with each address of its host; as it is where that has one, or none now."""
    parts = urlsplit(url)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            parts.hostname, parts.port or 80, type=socket.SOCK_STREAM
        )
    except (OSError, UnicodeError):
        return {url}
    hosts = {f"[{at[0]}]" if family == socket.AF_INET6 else str(at[0]) for family, _, _, _, at in found}
    if len(hosts) < 2 or parts.scheme != "http" or parts.hostname == "localhost":
        return {url}
    return {f"http://{host}:{parts.port or 80}" for host in hosts}


#: Between two tries to reach a gateway that refuses connections.
_AGAIN_S = 0.2


class Joining:
    """At one gateway's admin plane.

    Args:
        name, url: of the instance. role: for a gateway that cannot ask it.
        headers: that the admin plane asks for. key: of the cluster, if it has one; then that alone is proved.
        lease_s: after so long without a renewal the gateway takes it out. It is renewed three times as often; a
            renewal without an answer in a third of it is tried again at once.
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
        lease_s: float = 10.0,
    ) -> None:
        self._gateway = HttpPool("gateway", admin_url, key)
        self._url = self._gateway.url + "/instances"
        body = {"name": name, "url": url, "lease_s": lease_s, "incarnation": time.time_ns()}
        self._body = msgspec.json.encode(body if role is None else body | {"role": role})
        self._name = name
        self._headers = "".join(f"{header}: {value}\r\n" for header, value in headers.items() if key is None)
        self._lease_s = lease_s
        self._has_lease = False

    async def run(self) -> None:
        """Join and stay; leave when cancelled. A gateway that is not there is asked again and again."""
        problem = ""
        try:
            while True:
                before, (problem, pause_s) = problem, await self._renew()
                if problem != before:
                    logger.warning("%s", problem) if problem else logger.info("joined %s", self._url)
                await asyncio.sleep(pause_s)
        finally:
            if self._has_lease:  # where the name was refused, it is another's
                with suppress(ServeError, TimeoutError):
                    await self._ask("DELETE", f"/instances/{self._name}")
                    logger.info("left %s", self._url)
            await self._gateway.close()

    async def _renew(self) -> tuple[str, float]:
        """Return what is wrong ("" for nothing), and when to ask again."""
        try:
            await self._ask("POST", "/instances", self._body)
        except (InstanceLost, TimeoutError) as error:
            return f"{self._url} does not answer: {error or type(error).__name__}", _AGAIN_S
        except ServeError as error:
            self._has_lease = False
            return f"{self._url} answered {error.status}: {error.message[:300]}", self._lease_s / 3
        self._has_lease = True
        return "", self._lease_s / 3

    async def _ask(self, method: str, path: str, body: bytes = b"") -> None:
        headers = "content-type: application/json\r\n" + self._headers
        async with asyncio.timeout(self._lease_s / 3):
            await HttpCall(self._gateway, method, path, headers, [body] if body else []).ask()
