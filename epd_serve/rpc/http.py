"""The HTTP client for vLLM's servers, the admin API and health checks."""

from __future__ import annotations

import io
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import aiohttp
from yarl import URL

from epd_serve.errors import InstanceLost, InstanceUnreachable, error_from_response
from epd_serve.protocol.addresses import server_of
from epd_serve.rpc import sockets
from epd_serve.rpc.link import CERTIFICATE_NOT_ACCEPTED, MAX_BODY_BYTES, MAX_NOTE_BYTES
from epd_serve.rpc.tls import TlsFiles

#: Below most servers' keep-alive time (5 s), so no call uses a closing connection.
KEEP_ALIVE_S = 3.0
#: aiohttp warns about larger bodies in one piece.
_LARGE_BYTES = 1 << 20


class HttpPool:
    """Connections of one event loop, as an async context manager that closes them.

    Args:
        tls: the certificates for https; None expects servers with certificates of a public CA.
        path: the Unix socket of the server.
    """

    def __init__(self, tls: TlsFiles | None = None, path: Path | None = None) -> None:
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
                socket_factory=_create_socket,
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


def _create_socket(address: tuple[Any, ...]) -> socket.socket:
    made = socket.socket(*address[:3])
    made.setblocking(False)
    sockets.watch(made)
    return made


class HttpServer:
    """A server called over HTTP.

    Args:
        name: the instance's name, for error messages.
        address: the host name's address to call.

    Raises ValueError unless the URL is http(s).
    """

    def __init__(self, name: str, url: str, pool: HttpPool, *, address: str | None = None) -> None:
        parts = server_of(url)
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
        """Return an answer, which the caller closes, once its head is here. Raises InstanceLost."""
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
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> bytes:
        """Return the body of an answer.

        Raises InstanceLost, also if the body exceeds MAX_BODY_BYTES, and :meth:`error` for a status from 400.
        """
        async with await self.send(method, path, body, headers) as answer:
            if answer.status >= 400:
                raise self.error(answer.status, await self.read_error(answer))
            found = bytearray()
            while chunk := await self.read(answer):
                found += chunk
                if len(found) > MAX_BODY_BYTES:
                    raise InstanceLost(f"instance {self.name} answered with more than {MAX_BODY_BYTES} bytes")
            return bytes(found)

    async def read(self, answer: aiohttp.ClientResponse) -> bytes:
        """Return the next piece of an answer's body, empty at its end. Raises InstanceLost."""
        with self._failures("broke off its answer"):
            return await answer.content.readany()

    async def read_error(self, answer: aiohttp.ClientResponse) -> bytes:
        """Return the first MAX_NOTE_BYTES of an error's body. Raises InstanceLost."""
        body = bytearray()
        while len(body) <= MAX_NOTE_BYTES and (chunk := await self.read(answer)):
            body += chunk
        return bytes(body[:MAX_NOTE_BYTES])

    def error(self, status: int, body: bytes) -> Exception:
        """Return the error of a status from 400."""
        return error_from_response(status, body, origin=f"instance {self.name}")

    @contextmanager
    def _failures(self, failure: str) -> Iterator[None]:
        """Replace aiohttp's errors by InstanceLost."""
        try:
            yield
        except (aiohttp.ClientError, OSError, UnicodeError) as error:
            hint = f"; {CERTIFICATE_NOT_ACCEPTED}" if self._base.scheme == "https" else ""
            message = f"instance {self.name} at {self.url} {failure} ({str(error) or type(error).__name__}{hint})"
            if not isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
                raise InstanceLost(message) from error
            is_refused = isinstance(getattr(error, "os_error", None), ConnectionRefusedError)
            unreachable = InstanceUnreachable(message, is_refused=is_refused)
            raise (isinstance(error, OSError) and sockets.shortage_error(error)) or unreachable from error
