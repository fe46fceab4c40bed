"""Media by URL: ``http(s)://`` within limits of size, time and address, ``file://`` from named folders."""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urljoin, urlsplit

import aiohttp
from yarl import URL

from epd_serve.errors import InvalidRequest, ServeError, TooLarge
from proxy.addresses import Address, parse_address
from proxy.lookups import Lookups

logger = logging.getLogger(__name__)

MAX_REDIRECTS = 3
MAX_URL_LENGTH = 8192
#: Connections of one asker, and to one host: a slow one does not keep the others from being asked.
MAX_CONNECTIONS = 256
MAX_PER_HOST = 16
_PASSWORD = re.compile(r"://[^/?#]*@")
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


class AddressRefused(OSError):
    """A connection to an address that media URLs may not lead to."""

    def __init__(self, address: str) -> None:
        super().__init__(errno.EACCES, f"{address} is not public")


@dataclass(frozen=True, kw_only=True)
class UrlRules:
    """What a media URL may name, its redirects included.

    Attributes:
        domains: host names; "*.example.com" is all below example.com. None: any.
        ports: None: any.
    """

    domains: tuple[str, ...] | None = None
    ports: tuple[int, ...] | None = None

    def check(self, url: URL) -> None:
        """Raises InvalidRequest with what is not allowed. Look at no other parser's idea of the same URL."""
        if url.scheme not in ("http", "https"):
            raise InvalidRequest("only data:, http:// and https:// URLs are supported")
        if not url.host:
            raise InvalidRequest("the URL has no host")
        if url.user is not None or url.password is not None:
            raise InvalidRequest("URLs with a user name or a password are not supported")
        if self.ports is not None and url.port not in self.ports:
            allowed = ", ".join(map(str, sorted(self.ports)))
            raise InvalidRequest(f"port {url.port} is not allowed here; allowed are {allowed}")
        host = (url.raw_host or "").lower().removesuffix(".")
        if self.domains is not None and not any(_is_within(host, domain) for domain in self.domains):
            raise InvalidRequest(f"images may not be fetched from {host}; allowed are {', '.join(self.domains)}")


def _is_within(host: str, domain: str) -> bool:
    return host.endswith(domain[1:]) if domain.startswith("*.") else host == domain


class MediaFetcher:
    """Fetches media for requests; an async context manager that owns its connections.

    The address is checked where the socket for it is made: whatever the URL's spelling, the name's resolution or a
    redirect led to, it is the very address connected to that is checked. ``timeout_s`` bounds the whole of it, be
    the server's bytes ever so slow to come. Each asker has lookups and connections of its own.
    """

    def __init__(
        self,
        *,
        max_bytes: int,
        timeout_s: float,
        allowed_address: Callable[[Address], bool],
        allowed_file_dirs: tuple[Path, ...] = (),
        rules: UrlRules | None = None,
    ) -> None:
        self._sessions: dict[str, aiohttp.ClientSession] = {}
        self.reconfigure(
            max_bytes=max_bytes,
            timeout_s=timeout_s,
            allowed_address=allowed_address,
            allowed_file_dirs=allowed_file_dirs,
            rules=rules or UrlRules(),
        )

    def reconfigure(
        self,
        *,
        max_bytes: int,
        timeout_s: float,
        allowed_address: Callable[[Address], bool],
        allowed_file_dirs: tuple[Path, ...],
        rules: UrlRules,
    ) -> None:
        """From now on."""
        self._allowed_address = allowed_address
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._file_dirs = allowed_file_dirs
        self._rules = rules

    async def __aenter__(self) -> Self:
        return self

    def _session(self, asker: str) -> aiohttp.ClientSession:
        if asker not in self._sessions:
            self._sessions[asker] = self._new_session()
        return self._sessions[asker]

    def _new_session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                resolver=Lookups(),
                limit=MAX_CONNECTIONS,
                limit_per_host=MAX_PER_HOST,
                use_dns_cache=False,
                socket_factory=self._new_socket,
            ),
            timeout=aiohttp.ClientTimeout(total=None),  # fetch() keeps the time
            cookie_jar=aiohttp.DummyCookieJar(),
            # No compressed transfer: the size limit counts the real bytes.
            headers={"accept": "image/*", "accept-encoding": "identity", "user-agent": "epd-serve"},
            auto_decompress=False,
            trust_env=False,
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for session in self._sessions.values():
            await session.close()

    async def fetch(self, url: str, asker: str = "") -> bytes:
        """``asker`` is whose lookups and connections are used: those of one are no other's.

        Raises InvalidRequest that names the URL and what the client can do about it, TooLarge for too many bytes.
        A server that cannot be reached is one case, be its name unknown, its address private or nobody there, and
        nothing that a server sent is shown: who asks could otherwise look around in the inner network.
        """
        if len(url) > MAX_URL_LENGTH:
            raise InvalidRequest(f"{_short(url)} has {len(url)} characters; at most {MAX_URL_LENGTH} are accepted")
        if url[:5].lower() == "file:":
            return await asyncio.to_thread(self._read_file, url)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._get(url, self._session(asker))
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # Not with the URL, which may hold a signature.
            reason = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else type(error).__name__
            logger.info("an image of %s cannot be fetched: %s", URL(url).host, reason)
            raise InvalidRequest(
                f"{_short(url)} cannot be fetched: no picture came from it within {self._timeout_s:g} s; it must "
                "be on a server that this gateway may reach and that speaks HTTP"
            ) from error

    async def _get(self, url: str, session: aiohttp.ClientSession) -> bytes:
        location = self._checked(url, url)
        for _ in range(MAX_REDIRECTS + 1):
            # The very object that was checked is what is connected to: no second parser sees another host in it.
            async with session.get(location, allow_redirects=False) as response:
                if response.status in _REDIRECTS and "location" in response.headers:
                    target = urljoin(str(location), response.headers["location"])
                    try:
                        location = self._checked(target, url)
                    except InvalidRequest:
                        raise InvalidRequest(
                            f"{_short(url)} cannot be fetched: its server redirects to a place that is not "
                            "allowed here"
                        ) from None
                    continue
                if response.status != 200:
                    raise InvalidRequest(f"{_short(url)} cannot be fetched: the server answered {response.status}")
                if response.headers.get("content-encoding", "identity").lower() != "identity":
                    raise InvalidRequest(
                        f"{_short(url)} cannot be fetched: the server sent it compressed, which it was asked not "
                        "to do"
                    )
                return await self._read(url, response)
        raise InvalidRequest(f"{_short(url)} cannot be fetched: more than {MAX_REDIRECTS} redirects")

    def _checked(self, text: str, url: str) -> URL:
        """``text`` as a URL that the rules allow; ``url`` is what the client sent."""
        try:
            location = URL(text)
            self._rules.check(location)
        except InvalidRequest as error:
            raise InvalidRequest(f"{_short(url)}: {error.message}") from None
        except (ValueError, TypeError) as error:
            raise InvalidRequest(f"{_short(url)} is no URL: {error}") from error
        return location

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
    """The URL for an error: cut short, and without a password."""
    url = _PASSWORD.sub("://...@", url[:MAX_URL_LENGTH])
    return f"the image URL {url if len(url) <= 200 else url[:200] + '...'!r}"
