"""Fetch media over ``http(s)://`` within limits of size, time and address."""

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
#: Connections in total and per host, so that a slow host does not block others.
MAX_CONNECTIONS = 256
MAX_PER_HOST = 16
#: Bytes allowed for headers, interim responses and chunk framing, beyond twice the body.
_MAX_FRAMING_BYTES = 1 << 16
_PIECE_BYTES = 1 << 14
_MAX_REDIRECTS = 3
#: Time limit of a download; the client waits and occupies its place in the queue.
FETCH_TIMEOUT_S = 10.0
#: Scheme and host of a URL; ASCII characters of the rest, which are sent unchanged.
_ORIGIN = re.compile(r"[^/?#]*//[^/?#]*")
_SENT_AS_IS = "".join(map(chr, range(0x21, 0x7F)))
_PASSWORD = re.compile(r"://[^/?#]*@")
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


class _Protocol(ResponseHandler):
    """Aborts a server that sends endless framing: interim responses, tiny chunks, chunk extensions."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._num_received = 0
        self._body: StreamReader | None = None

    def set_response_params(self, **params: Any) -> None:
        self._num_received, self._body = 0, None  # a connection may serve several requests
        super().set_response_params(**params)

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), _PIECE_BYTES) or (0,):  # empty data: reading resumes
            piece = data[start : start + _PIECE_BYTES]
            self._num_received += len(piece)
            super().data_received(piece)
            self._body = self._payload or self._body  # aiohttp drops it when complete
            num_of_body = 0 if self._body is None else self._body.total_bytes
            if self._num_received > _MAX_FRAMING_BYTES + 2 * num_of_body:
                if self.transport is not None:
                    self.transport.abort()
                return


@dataclass(slots=True, eq=False)
class _Download:
    task: asyncio.Task[bytes]
    num_waiting: int = 0


class MediaFetcher:
    """Fetches media; an async context manager that owns its connections.

    The address is checked when its socket is created, so the check covers the address actually connected to,
    whatever the URL's spelling, name resolution or redirects. A proxy of the environment (``media.trust_env``)
    resolves and connects by itself. ``timeout_s`` limits the whole download.
    """

    def __init__(self, settings: GatewaySettings, timeout_s: float = FETCH_TIMEOUT_S) -> None:
        self._media = settings.gateway.media
        self._max_bytes = settings.gateway.max_body_bytes
        self._allow_private = settings.allow_private
        self._timeout_s = timeout_s
        self._downloads: dict[str, _Download] = {}

    async def __aenter__(self) -> Self:
        self._direct, self._by_proxy = self._new_session(self._new_socket), self._new_session(None)
        return self

    def _new_session(self, socket_factory: Any) -> aiohttp.ClientSession:
        connector: Any = aiohttp.TCPConnector(
            resolver=Lookups(),
            limit=MAX_CONNECTIONS,
            limit_per_host=MAX_PER_HOST,
            use_dns_cache=False,
            socket_factory=socket_factory,
        )
        connector._factory = partial(_Protocol, loop=connector._loop)
        return aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None),  # _download() sets the timeout
            cookie_jar=aiohttp.DummyCookieJar(),
            # no compression, so that the size limit counts real bytes
            headers={
                "accept": "image/*, video/*, audio/*",
                "accept-encoding": "identity",
                "user-agent": "epd-serve",
            },
            auto_decompress=False,
            trust_env=False,  # True would also send passwords of ~/.netrc
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._direct.close()
        await self._by_proxy.close()

    def is_fetching(self, url: str) -> bool:
        """Return whether the file is being downloaded, so that :meth:`fetch` needs no connection."""
        return url in self._downloads

    async def fetch(self, url: str) -> bytes:
        """Fetch a file; concurrent callers share one download.

        Raises InvalidRequest with the URL and a remedy, TooLarge for too many bytes. Errors do not reveal whether
        a name is unknown, an address private or a port closed, nor anything a server sent: a client could
        otherwise explore the internal network.
        """
        if (download := self._downloads.get(url)) is None:
            download = self._downloads[url] = _Download(asyncio.create_task(self._download(url)))
        download.num_waiting += 1
        try:
            return await asyncio.shield(download.task)
        except InvalidRequest as error:
            raise copy(error) from error  # each request adds its own param
        finally:
            download.num_waiting -= 1
            if not download.num_waiting:
                del self._downloads[url]
                download.task.cancel()

    async def _download(self, url: str) -> bytes:
        if len(url) > MAX_URL_LENGTH:
            raise InvalidRequest(f"{_quote(url)} has {len(url)} characters; at most {MAX_URL_LENGTH} are accepted")
        timeout_s = self._timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._get(url)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # without the URL, which may contain a signature
            reason = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else type(error).__name__
            logger.warning("cannot fetch media from %s: %s", URL(url).host, reason)
            raise InvalidRequest(
                f"{_quote(url)} cannot be fetched: its server must be reachable for this gateway, speak HTTP and "
                f"send the file within {timeout_s:g} s"
            ) from error

    async def _get(self, url: str) -> bytes:
        location = self._checked(url, url)
        for _ in range(_MAX_REDIRECTS + 1):
            proxy = None
            if self._media.trust_env and not proxy_bypass(location.host or ""):
                proxy = getproxies().get(location.scheme)
            session = self._direct if proxy is None else self._by_proxy
            async with session.get(location, proxy=proxy, allow_redirects=False) as response:
                if response.status in _REDIRECTS and "location" in response.headers:
                    target = urljoin(str(location), response.headers["location"])
                    try:
                        location = self._checked(target, url)
                    except InvalidRequest:
                        raise InvalidRequest(
                            f"{_quote(url)} cannot be fetched: its server redirects to a forbidden address"
                        ) from None
                    continue
                if response.status != 200:
                    raise InvalidRequest(f"{_quote(url)} cannot be fetched: its server answered {response.status}")
                if response.headers.get("content-encoding", "identity").lower() != "identity":
                    raise InvalidRequest(
                        f"{_quote(url)} cannot be fetched: the server compressed it despite accept-encoding: "
                        "identity"
                    )
                max_bytes = self._max_bytes
                data = bytearray()
                if (response.content_length or 0) <= max_bytes:
                    async for chunk in response.content.iter_any():
                        data += chunk
                        if len(data) > max_bytes:
                            break
                    else:
                        return bytes(data)
                raise TooLarge(f"{_quote(url)} has more than {max_bytes} bytes, the limit for a file")
        raise InvalidRequest(f"{_quote(url)} cannot be fetched: more than {_MAX_REDIRECTS} redirects")

    def _checked(self, text: str, url: str) -> URL:
        """Return ``text`` as an allowed URL; ``url`` is the client's. Raises InvalidRequest.

        Path and query keep their bytes, because servers check signatures over them. Only one parser reads the
        host, because another could see another host.
        """
        try:
            location, domains = URL(text), self._media.allowed_domains
            host = (location.raw_host or "").lower().removesuffix(".")
            problem = ""
            if location.scheme not in ("http", "https"):
                problem = "only data:, http:// and https:// URLs are supported"
            elif not location.host:
                problem = "the URL lacks a host"
            elif location.user is not None or location.password is not None:
                problem = "URLs with a user name or a password are not supported"
            elif domains is not None and not any(
                host.endswith(one[1:]) if one.startswith("*.") else host == one for one in domains
            ):
                problem = f"fetching from {host} is not allowed; allowed: {', '.join(domains)}"
        except (ValueError, TypeError) as error:
            raise InvalidRequest(f"{_quote(url)} is not a URL: {error}") from error
        if problem:
            raise InvalidRequest(f"{_quote(url)}: {problem}")
        path = quote(_ORIGIN.sub("", text, count=1), safe=_SENT_AS_IS)
        return URL(f"{location.origin()}{path}", encoded=True)

    def _new_socket(self, info: tuple[Any, ...]) -> socket.socket:
        """Create the socket for one address; the connector calls this before connecting."""
        family, kind, protocol, _, target = info
        address = target[0]
        if not self._allow_private and not is_public(parse_address(address)):
            raise OSError(errno.EACCES, f"{address} is not public")
        return socket.socket(family=family, type=kind, proto=protocol)


def _quote(url: str) -> str:
    """Return the URL for an error message, without a password."""
    url = _PASSWORD.sub("://...@", url[:MAX_URL_LENGTH])
    return f"the media URL {url if len(url) <= 200 else url[:200] + '...'!r}"
