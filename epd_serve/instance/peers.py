"""Calls from one instance to another."""

from __future__ import annotations

import asyncio

import aiohttp

from epd_serve.config.keys import cluster_key
from epd_serve.errors import InstanceFailed, error_from_response
from epd_serve.protocol import wire


class Peers:
    """HTTP client for control calls: msgpack there, msgpack back. There is nothing to close before the first."""

    def __init__(self) -> None:
        self._opened: aiohttp.ClientSession | None = None

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._opened is None:
            # no limit on connections: a reservation waits on its own for as long as D is full
            key = cluster_key()
            self._opened = aiohttp.ClientSession(
                headers={} if key is None else {wire.CLUSTER_HEADER: key},
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
            )
        return self._opened

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()

    async def call(self, url: str, path: str, message: wire.Message, timeout_s: float | None = None) -> bytes:
        """POST a message and return the answer's body.

        Raises the ServeError that the peer answered with, InstanceFailed where it is gone or does not answer in
        ``timeout_s``.
        """
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.post(url + path, data=wire.encode(message)) as answer,
            ):
                body = await answer.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise InstanceFailed(f"{url} does not answer {path}: {error or type(error).__name__}") from error
        if answer.status >= 400:
            raise error_from_response(answer.status, body, origin=url)
        return body
