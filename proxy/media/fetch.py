"""Media by URL: ``http(s)://`` within limits of size, time and address."""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import socket
from copy import copy
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, urljoin
from urllib.request import getproxies, proxy_bypass

import aiohttp
from aiohttp import StreamReader
from aiohttp.client_proto import ResponseHandler
from yarl import URL

from epd_serve.errors import InvalidRequest, TooLarge
from proxy.media.resolver import Lookups, is_public, parse_address
from proxy.settings import GatewaySettings

logger = logging.getLogger(__name__)

MAX_URL_LENGTH = 8192
#: Connections in all, and to one host: a slow one does not keep the others from being asked.
MAX_CONNECTIONS = 256
MAX_PER_HOST = 16
#: Bytes beyond twice those of the body: heads, interim answers and the framing of chunks.
_MAX_FRAMING_BYTES = 1 << 16
_PIECE_BYTES = 1 << 14
#: A longer chain is a loop in practice.
_MAX_REDIRECTS = 3
#: Longest download of a media URL: the client waits meanwhile, and holds its place in the queue.
FETCH_TIMEOUT_S = 10.0
#: What stands before a URL's path, and the ASCII characters that are sent as they came.
_ORIGIN = re.compile(r"[^/?#]*//[^/?#]*")
_SENT_AS_IS = "".join(map(chr, range(0x21, 0x7F)))
_PASSWORD = re.compile(r"://[^/?#]*@")
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


class _Protocol(ResponseHandler):
    """Breaks off where a server sends framing without end: interim answers, tiny chunks, chunk extensions."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._num_received = 0
        self._body: StreamReader | None = None

    def set_response_params(self, **params: Any) -> None:
        self._num_received, self._body = 0, None  # a connection may serve several requests
        super().set_response_params(**params)

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), _PIECE_BYTES) or (0,):  # no data: it was paused and goes on
            piece = data[start : start + _PIECE_BYTES]
            self._num_received += len(piece)
            super().data_received(piece)
            self._body = self._payload or self._body  # aiohttp forgets it once it is whole
            num_of_body = 0 if self._body is None else self._body.total_bytes
            if self._num_received > _MAX_FRAMING_BYTES + 2 * num_of_body:
                if self.transport is not None:
                    self.transport.abort()
                return


class _Connector(aiohttp.TCPConnector):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._factory: Any = partial(_Protocol, loop=self._loop)


@dataclass(slots=True, eq=False)
class _Download:
    task: asyncio.Task[bytes]
    num_waiting: int = 0


class MediaFetcher:
    """Fetches media for requests; an async context manager that owns its connections.

    The address is checked where the socket for it is made: whatever the URL's spelling, the name's resolution or a
    redirect led to, it is the very address connected to that is checked. A proxy of the environment
    (``media.trust_env``) resolves names and connects by itself. ``timeout_s`` bounds a whole download.
    """

    def __init__(self, settings: GatewaySettings, timeout_s: float = FETCH_TIMEOUT_S) -> None:
        self._media = settings.gateway.media
        self._allow_private = settings.allow_private
        self._timeout_s = timeout_s
        self._downloads: dict[str, _Download] = {}

    async def __aenter__(self) -> Self:
        self._direct, self._by_proxy = self._new_session(self._new_socket), self._new_session(None)
        return self

    def _new_session(self, socket_factory: Any) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=_Connector(
                resolver=Lookups(),
                limit=MAX_CONNECTIONS,
                limit_per_host=MAX_PER_HOST,
                use_dns_cache=False,
                socket_factory=socket_factory,
            ),
            timeout=aiohttp.ClientTimeout(total=None),  # _download() keeps the time
            cookie_jar=aiohttp.DummyCookieJar(),
            # No compressed transfer: the size limit counts the real bytes.
            headers={
                "accept": "image/*, video/*, audio/*",
                "accept-encoding": "identity",
                "user-agent": "epd-serve",
            },
            auto_decompress=False,
            trust_env=False,  # it would send passwords of ~/.netrc, too
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._direct.close()
        await self._by_proxy.close()

    def is_fetching(self, url: str) -> bool:
        """Return whether the file is on its way, so that :meth:`fetch` needs no connection for it."""
        return url in self._downloads

    async def fetch(self, url: str) -> bytes:
        """Fetch a file, once for all that ask while it is on its way.

        Raises InvalidRequest that names the URL and what the client can do about it, TooLarge for too many bytes.
        A server that cannot be reached is one case, be its name unknown, its address private or nobody there, and
        nothing that a server sent is shown: who asks could otherwise look around in the inner network.
        """
        if (download := self._downloads.get(url)) is None:
            download = self._downloads[url] = _Download(asyncio.create_task(self._download(url)))
        download.num_waiting += 1
        try:
            return await asyncio.shield(download.task)
        except InvalidRequest as error:
            raise copy(error) from error  # each request names the item in its own
        finally:
            download.num_waiting -= 1
            if not download.num_waiting:
                del self._downloads[url]
                download.task.cancel()

    async def _download(self, url: str) -> bytes:
        if len(url) > MAX_URL_LENGTH:
            raise InvalidRequest(f"{_short(url)} has {len(url)} characters; at most {MAX_URL_LENGTH} are accepted")
        timeout_s = self._timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._get(url)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # Not with the URL, which may hold a signature.
            reason = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else type(error).__name__
            logger.info("a media item of %s cannot be fetched: %s", URL(url).host, reason)
            raise InvalidRequest(
                f"{_short(url)} cannot be fetched: it must be on a server that this gateway may reach, that "
                f"speaks HTTP and that sends the file within {timeout_s:g} s"
            ) from error

    async def _get(self, url: str) -> bytes:
        location = self._checked(url, url)
        for _ in range(_MAX_REDIRECTS + 1):
            proxy = self._proxy_of(location)
            session = self._direct if proxy is None else self._by_proxy
            async with session.get(location, proxy=proxy, allow_redirects=False) as response:
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
                max_bytes = self._media.max_bytes
                data = bytearray()
                if (response.content_length or 0) <= max_bytes:
                    async for chunk in response.content.iter_any():
                        data += chunk
                        if len(data) > max_bytes:
                            break
                    else:
                        return bytes(data)
                raise TooLarge(f"{_short(url)} has more than {max_bytes} bytes, the limit for such a file")
        raise InvalidRequest(f"{_short(url)} cannot be fetched: more than {_MAX_REDIRECTS} redirects")

    def _checked(self, text: str, url: str) -> URL:
        """Return ``text`` as a URL that the rules allow; ``url`` is that of the client.

        Its path and query have the bytes of ``text``: servers check signatures over them. Raises InvalidRequest.
        The host is that of one parser: another could see another host in the text.
        """
        try:
            location, domains = URL(text), self._media.allowed_domains
            host = (location.raw_host or "").lower().removesuffix(".")
            problem = ""
            if location.scheme not in ("http", "https"):
                problem = "only data:, http:// and https:// URLs are supported"
            elif not location.host:
                problem = "the URL has no host"
            elif location.user is not None or location.password is not None:
                problem = "URLs with a user name or a password are not supported"
            elif domains is not None and not any(
                host.endswith(one[1:]) if one.startswith("*.") else host == one for one in domains
            ):
                problem = f"media may not be fetched from {host}; allowed are {', '.join(domains)}"
        except (ValueError, TypeError) as error:
            raise InvalidRequest(f"{_short(url)} is no URL: {error}") from error
        if problem:
            raise InvalidRequest(f"{_short(url)}: {problem}")
        path = quote(_ORIGIN.sub("", text, count=1), safe=_SENT_AS_IS)
        return URL(f"{location.origin()}{path}", encoded=True)

    def _proxy_of(self, location: URL) -> str | None:
        """Return the proxy that the environment names for the URL, where that counts."""
        if not self._media.trust_env or proxy_bypass(location.host or ""):
            return None
        return getproxies().get(location.scheme)

    def _new_socket(self, info: tuple[Any, ...]) -> socket.socket:
        """Called by the connector for each address that it is about to connect to."""
        family, kind, protocol, _, target = info
        address = target[0]
        if not self._allow_private and not is_public(parse_address(address)):
            raise OSError(errno.EACCES, f"{address} is not public")
        return socket.socket(family=family, type=kind, proto=protocol)


def _short(url: str) -> str:
    """The URL for an error: cut short, and without a password."""
    url = _PASSWORD.sub("://...@", url[:MAX_URL_LENGTH])
    return f"the media URL {url if len(url) <= 200 else url[:200] + '...'!r}"
