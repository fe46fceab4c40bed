"""An instance that was started by itself joins gateways: it takes a lease at each and renews it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress

import msgspec

from epd_serve.backends.http_client import HttpCall, HttpPool
from epd_serve.errors import InstanceLost, ServeError

logger = logging.getLogger(__name__)

#: Between two tries to reach a gateway that refuses connections.
_AGAIN_S = 0.2


class Joining:
    """At one gateway's admin plane.

    Args:
        name, url: of the instance.
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
        key: str | None = None,
        lease_s: float = 10.0,
    ) -> None:
        self._gateway = HttpPool("gateway", admin_url, key)
        self._url = self._gateway.url + "/instances"
        self._body = msgspec.json.encode({"name": name, "url": url, "lease_s": lease_s})
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
