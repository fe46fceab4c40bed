"""Calls from one instance to another."""

from __future__ import annotations

import asyncio

from epd_serve.backends.http_client import HttpCall, HttpPool
from epd_serve.config.keys import cluster_key
from epd_serve.errors import PEER_UNREACHABLE, InstanceFailed, InstanceLost
from epd_serve.protocol import wire

_HEADERS = f"content-type: {wire.CONTENT_TYPE}\r\n"


class Peers:
    """HTTP client for control calls: msgpack there, msgpack back. There is no limit on connections: a reservation
    waits on its own for as long as D is full."""

    def __init__(self) -> None:
        self._pools: dict[str, HttpPool] = {}

    async def close(self) -> None:
        await asyncio.gather(*[pool.close() for pool in self._pools.values()])

    async def call(self, url: str, path: str, message: wire.Message, timeout_s: float | None = None) -> bytes:
        """POST a message and return the answer's body.

        Raises the ServeError that the peer answered with, and InstanceFailed with code ``peer_unreachable`` where
        it is gone or does not answer in ``timeout_s``.
        """
        if (pool := self._pools.get(url)) is None:
            pool = self._pools[url] = HttpPool(url, url, cluster_key())
        try:
            async with asyncio.timeout(timeout_s):
                return await HttpCall(pool, "POST", path, _HEADERS, [wire.encode(message)]).ask()
        except (InstanceLost, TimeoutError) as error:
            reason = str(error) or f"nothing in {timeout_s:g} s"
            raise unreachable(f"{url} does not answer {path}: {reason}") from error


def unreachable(message: str) -> InstanceFailed:
    """Return an error: this instance, which is well, cannot reach another, which may be well too."""
    return InstanceFailed(message, code=PEER_UNREACHABLE)
