"""HTTP requests to the server under test: each is sent once, and timed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import cached_property
from time import perf_counter
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import aiohttp

from epd_serve.bench.answer import Answer, error_message
from epd_serve.bench.types import Failure

_CONNECT_TIMEOUT_S = 10.0
#: uvicorn closes idle connections after 5 s; do not send on one that is about to close.
_KEEP_ALIVE_S = 4.0
#: aiohttp warns of bodies above 1 MiB that are written in one piece.
_PIECE_BYTES = 1 << 20


class Exchange:
    """One request and what came back.

    Attributes:
        sent_s: when sending began, by ``perf_counter``; connecting comes after it.
        answer: reads a stream of events; None where the body is wanted as it is.
        body: the bytes of an answer that no ``answer`` reads.
        finish_s: when the last byte came, or the failure was known; None before.
        failure, detail: why it failed; None for a success.
    """

    def __init__(self, answer: Answer | None = None) -> None:
        self.answer = answer
        self.sent_s = 0.0
        self.finish_s: float | None = None
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.failure: Failure | None = None
        self.detail = ""


class HttpClient:
    """Requests to one server, over as many connections as there are requests at once.

    Attributes:
        base_url: what all paths begin with.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None, keep_alive: bool = True) -> None:
        """Raises ValueError for a URL that is not http(s), or that holds a password.

        ``keep_alive``: whether a connection may serve several requests.
        """
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{base_url!r} is no URL of a server; it should look like 'http://127.0.0.1:8000'")
        if parts.username is not None or parts.password is not None:
            raise ValueError("--base-url must hold no user and no password; put a key into OPENAI_API_KEY")
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._keep_alive = keep_alive

    @cached_property
    def _http(self) -> aiohttp.ClientSession:
        """aiohttp's session, which must be made in the event loop."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
            if self._keep_alive
            else aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=1 << 20,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Break off all requests."""
        await self._http.close()

    async def get(self, path: str, *, timeout_s: float) -> Exchange:
        exchange = Exchange()
        await self.send(exchange, "GET", path, timeout_s=timeout_s)
        return exchange

    async def send(
        self,
        exchange: Exchange,
        method: str,
        path: str,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        *,
        timeout_s: float,
    ) -> None:
        """Send a request and fill ``exchange`` as the answer comes. Cancelling closes the connection."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(exchange, method, path, body, headers or {})
        except TimeoutError as error:
            if isinstance(error, aiohttp.ServerTimeoutError):
                _fail(exchange, Failure.CONNECT, f"no connection in {_CONNECT_TIMEOUT_S:g} s")
            else:
                _fail(exchange, Failure.TIMEOUT, f"not finished within {timeout_s:g} s")
        except aiohttp.ClientConnectorError as error:
            _fail(exchange, Failure.CONNECT, error.os_error.strerror or str(error))
        except aiohttp.ClientResponseError as error:
            _fail(exchange, Failure.MALFORMED, f"no HTTP: {error.message}")
        except (aiohttp.ClientError, OSError) as error:
            _end_cut(exchange, str(error))
        finally:
            exchange.finish_s = perf_counter()

    async def _send(
        self, exchange: Exchange, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> None:
        headers = {**self._headers, **headers}
        if body:
            headers["Content-Length"] = str(len(body))
        data = _pieces(body) if len(body) > _PIECE_BYTES else body
        exchange.sent_s = perf_counter()
        async with self._http.request(
            method, self.base_url + path, data=data or None, headers=headers, allow_redirects=False
        ) as response:
            exchange.status = response.status
            exchange.headers = {name.lower(): value for name, value in response.headers.items()}
            answer = exchange.answer
            is_stream = (
                answer is not None
                and 200 <= response.status < 300
                and response.content_type == "text/event-stream"
            )
            async for piece in response.content.iter_any():
                at_s = perf_counter()
                if answer is not None and is_stream:
                    answer.feed(piece, at_s)
                else:
                    exchange.body += piece
        if not 200 <= exchange.status < 300:
            _fail(exchange, Failure.HTTP_STATUS, error_message(bytes(exchange.body)))
        elif answer is not None and not is_stream:
            message = error_message(bytes(exchange.body))
            _fail(exchange, Failure.MALFORMED, f"the answer is no stream of events: {message}")
        elif answer is not None:
            answer.end(complete=True)
            exchange.failure, exchange.detail = answer.failure, answer.detail


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), _PIECE_BYTES):
        yield body[start : start + _PIECE_BYTES]


def _fail(exchange: Exchange, failure: Failure, detail: str) -> None:
    """Record a failure, unless the stream itself has named an earlier one."""
    earlier = exchange.answer.failure if exchange.answer is not None else None
    exchange.failure = earlier or failure
    exchange.detail = exchange.answer.detail if earlier and exchange.answer is not None else detail


def _end_cut(exchange: Exchange, reason: str) -> None:
    """Record a connection that ended before the answer did."""
    if not exchange.status:
        _fail(exchange, Failure.CONNECTION_LOST, reason or "the connection was closed before an answer")
    elif exchange.answer is None or not 200 <= exchange.status < 300:
        _fail(exchange, Failure.CUT_STREAM, reason)
    else:
        exchange.answer.end(complete=False, reason=reason)
        exchange.failure, exchange.detail = exchange.answer.failure, exchange.answer.detail
