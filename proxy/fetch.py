"""Media by URL: ``http(s)://`` within limits of size, time and address, ``file://`` from named folders."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urljoin, urlsplit

import aiohttp

from epd_serve.errors import InvalidRequest, ServeError, TooLarge
from proxy.addresses import Address, parse_address

MAX_REDIRECTS = 3
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


class AddressRefused(OSError):
    """A connection to an address that media URLs may not lead to."""

    def __init__(self, address: str) -> None:
        super().__init__(
            errno.EACCES, f"{address} is no public address, and this gateway fetches from public ones only"
        )


class MediaFetcher:
    """Fetches media for requests; an async context manager that owns its connections.

    The address is checked where the socket for it is made: whatever the URL's spelling, the name's resolution or a
    redirect led to, it is the very address connected to that is checked.
    """

    def __init__(
        self,
        *,
        max_bytes: int,
        timeout_s: float,
        allowed_address: Callable[[Address], bool],
        allowed_file_dirs: tuple[Path, ...] = (),
    ) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._allowed_address = allowed_address
        self._file_dirs = allowed_file_dirs
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=64, use_dns_cache=False, socket_factory=self._new_socket),
            timeout=aiohttp.ClientTimeout(total=None),  # fetch() keeps the time
            cookie_jar=aiohttp.DummyCookieJar(),
            # No compressed transfer: the size limit counts the real bytes.
            headers={"accept": "image/*", "accept-encoding": "identity", "user-agent": "epd-serve"},
            auto_decompress=False,
            trust_env=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def fetch(self, url: str) -> bytes:
        """Raises InvalidRequest that names the URL and what went wrong, TooLarge for too many bytes."""
        try:
            scheme = urlsplit(url).scheme.lower()
        except ValueError as error:
            raise InvalidRequest(f"{_short(url)} is no URL: {error}") from error
        if scheme == "file":
            return await asyncio.to_thread(self._read_file, url)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._get(url)
        except TimeoutError as error:
            raise InvalidRequest(f"{_short(url)} was not fetched within {self._timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise InvalidRequest(f"{_short(url)} cannot be fetched: {error or type(error).__name__}") from error

    async def _get(self, url: str) -> bytes:
        assert self._session is not None
        location = url
        for _ in range(MAX_REDIRECTS + 1):
            if urlsplit(location).scheme.lower() not in ("http", "https"):
                raise InvalidRequest(f"{_short(location)}: only data:, http:// and https:// URLs are supported")
            async with self._session.get(location, allow_redirects=False) as response:
                if response.status in _REDIRECTS and "location" in response.headers:
                    location = urljoin(location, response.headers["location"])
                    continue
                if response.status != 200:
                    raise InvalidRequest(f"{_short(url)} cannot be fetched: the server answered {response.status}")
                return await self._read(url, response)
        raise InvalidRequest(f"{_short(url)} cannot be fetched: more than {MAX_REDIRECTS} redirects")

    async def _read(self, url: str, response: aiohttp.ClientResponse) -> bytes:
        if (response.content_length or 0) > self._max_bytes:
            raise self._too_large(url)
        data = bytearray()
        async for chunk in response.content.iter_any():
            data += chunk
            if len(data) > self._max_bytes:
                raise self._too_large(url)
        return bytes(data)

    def _new_socket(self, info: tuple[Any, ...]) -> socket.socket:
        """Called by the connector for each address that it is about to connect to."""
        family, kind, protocol, _, target = info
        address = target[0]
        if not self._allowed_address(parse_address(address)):
            raise AddressRefused(address)
        return socket.socket(family=family, type=kind, proto=protocol)

    def _read_file(self, url: str) -> bytes:
        parts = urlsplit(url)
        refusal = InvalidRequest(
            f"{_short(url)}: file URLs are only read from the directories that the gateway allows"
        )
        if parts.netloc not in ("", "localhost"):
            raise refusal
        try:
            path = Path(unquote(parts.path)).resolve(strict=True)
            if not any(path.is_relative_to(folder) for folder in self._file_dirs) or not path.is_file():
                raise refusal
            with path.open("rb") as file:
                data = file.read(self._max_bytes + 1)
        except (
            OSError,
            ValueError,
            RuntimeError,
        ) as error:  # the same answer as above: files elsewhere stay unknown
            raise refusal from error
        if len(data) > self._max_bytes:
            raise self._too_large(url)
        return data

    def _too_large(self, url: str) -> ServeError:
        return TooLarge(f"{_short(url)} has more than {self._max_bytes} bytes, which is the limit for an image")


def _short(url: str) -> str:
    return f"the image URL {url if len(url) <= 200 else url[:200] + '...'!r}"
