"""Calls over HTTP: to vLLM's servers, to the admin API, and for health."""

from __future__ import annotations

import io
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp
from yarl import URL

from epd_serve.errors import InstanceLost, InstanceUnreachable, error_from_response
from epd_serve.rpc import sockets
from epd_serve.rpc.descriptors import shortage
from epd_serve.rpc.link import CERTIFICATE_NOT_ACCEPTED, MAX_BODY_BYTES, MAX_NOTE_BYTES
from epd_serve.rpc.tls import TlsFiles

#: Below the keep-alive time of most servers (5 s): no call meets a connection that is just being closed.
KEEP_ALIVE_S = 3.0
#: aiohttp warns of larger bodies in one piece.
_LARGE_BYTES = 1 << 20


class HttpPool:
    """Connections to servers; an async context manager that closes them. It belongs to one event loop."""

    def __init__(self, tls: TlsFiles | None = None, path: Path | None = None) -> None:
        """With https both ends show a certificate of the CA in ``tls``; None: the server one of a public CA.
        ``path`` is the Unix socket at which the server is."""
        self.tls = tls
        self._path = path

    @cached_property
    def session(self) -> aiohttp.ClientSession:
        if self._path is not None:
            connector: aiohttp.BaseConnector = aiohttp.UnixConnector(str(self._path))
        else:
            connector = aiohttp.TCPConnector(
                limit=0,
                keepalive_timeout=KEEP_ALIVE_S,
                socket_factory=_watched,
                ssl=True if self.tls is None else self.tls.client_context(),
            )
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=sockets.SILENCE_S),
            skip_auto_headers=("accept-encoding", "user-agent", "content-type"),
            auto_decompress=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if (session := self.__dict__.pop("session", None)) is not None:
            await session.close()


def _watched(found: tuple[Any, ...]) -> socket.socket:
    made = socket.socket(*found[:3])
    made.setblocking(False)
    sockets.watch(made)
    return made


class HttpServer:
    """One server.

    Attributes:
        name: the instance's, for error messages. url: without a slash at its end.
    """

    def __init__(self, name: str, url: str, pool: HttpPool, *, address: str | None = None) -> None:
        """``address``: the one that is meant of a host name with several. Raises ValueError for a URL that is not
        http(s)."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError(f"{url!r} is no URL of a server; it should look like 'http://10.0.0.1:9000'")
        self.name = name
        self.url = url.rstrip("/")
        self._pool = pool
        self._base = URL(self.url)
        self._options: dict[str, Any] = {"allow_redirects": False}
        self._headers = {}
        if address is not None:
            self._headers = {"host": parts.netloc.rpartition("@")[2]}
            self._options["server_hostname"] = parts.hostname if parts.scheme == "https" else None
            self._base = self._base.with_host(address)

    async def send(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> aiohttp.ClientResponse:
        """Return an answer whose head has come; close it. Raises InstanceLost."""
        data = io.BytesIO(body) if len(body) > _LARGE_BYTES else body
        with self._failures("is not reachable"):
            return await self._pool.session.request(
                method,
                URL(f"{self._base}{path}", encoded=True),
                data=data or None,
                headers={**self._headers, **(headers or {})},
                **self._options,
            )

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        max_bytes: int = MAX_BODY_BYTES,
    ) -> bytes:
        """Return the body of an answer.

        Raises InstanceLost, also for a body of more than ``max_bytes``, and the error of a status from 400.
        """
        async with await self.send(method, path, body, headers) as answer:
            if answer.status >= 400:
                raise self.error(answer.status, await self.read_error(answer))
            found = bytearray()
            while chunk := await self.read(answer):
                found += chunk
                if len(found) > max_bytes:
                    raise InstanceLost(f"instance {self.name} answered with more than {max_bytes} bytes")
            return bytes(found)

    async def read(self, answer: aiohttp.ClientResponse) -> bytes:
        """Return the next piece of an answer's body, nothing at its end. Raises InstanceLost."""
        with self._failures("broke off its answer"):
            return await answer.content.readany()

    async def read_error(self, answer: aiohttp.ClientResponse) -> bytes:
        """Return an error's body, or its beginning. Raises InstanceLost."""
        body = bytearray()
        while len(body) <= MAX_NOTE_BYTES and (chunk := await self.read(answer)):
            body += chunk
        return bytes(body[:MAX_NOTE_BYTES])

    def error(self, status: int, body: bytes) -> Exception:
        """Return the error for which a status from 400 stands."""
        return error_from_response(status, body, origin=f"instance {self.name}")

    @contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        try:
            yield
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            is_refused = isinstance(getattr(error, "os_error", None), ConnectionRefusedError)
            unreachable = InstanceUnreachable(self._lost(what, error), is_refused=is_refused)
            raise (isinstance(error, OSError) and shortage(error)) or unreachable from error
        except (aiohttp.ClientError, OSError, UnicodeError) as error:
            raise InstanceLost(self._lost(what, error)) from error

    def _lost(self, what: str, error: Exception) -> str:
        more = f"; {CERTIFICATE_NOT_ACCEPTED}" if self._base.scheme == "https" else ""
        return f"instance {self.name} at {self.url} {what} ({str(error) or type(error).__name__}{more})"
