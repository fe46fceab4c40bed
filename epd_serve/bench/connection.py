"""HTTP/1.1 to the server under test: one attempt per request, times taken where bytes leave and come.

A request costs no task, and nothing is ever sent twice. A connection is used again only within
:data:`KEEP_ALIVE_S` of its last answer: a server that closes it in between would fail a request that it never saw.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from time import perf_counter
from types import SimpleNamespace
from typing import cast
from urllib.parse import urlsplit

import httptools

from epd_serve.bench.answer import Answer, error_message
from epd_serve.bench.types import Failure

#: Below what servers keep idle connections for (uvicorn: 5 s).
KEEP_ALIVE_S = 3.0
CONNECT_TIMEOUT_S = 10.0


class Target:
    """The address of the server under test; its name is looked up once.

    Attributes:
        addresses: all that the name stands for; only the one that takes connections once that is known.
        address: the first of them.
    """

    def __init__(self, url: str) -> None:
        """Look the host up. Raises ValueError for a URL that is not http(s) or a host that cannot be resolved."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no URL of a server; it should look like 'http://127.0.0.1:8000'")
        if parts.username is not None or parts.password is not None:
            raise ValueError(
                "a user or a password in --base-url is not sent; leave them out, and put a key into OPENAI_API_KEY"
            )
        self.url = url.rstrip("/")
        self.host = parts.hostname
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.port = parts.port or (443 if self.tls else 80)
        self.prefix = parts.path.rstrip("/").removesuffix("/v1")
        self.host_header = parts.netloc
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ValueError(f"{self.host}: {error.strerror or error}; is --base-url right?") from error
        self.addresses = list(dict.fromkeys(str(one[4][0]) for one in found))
        self.address = self.addresses[0]

    def head(self, method: str, path: str, headers: str, size: int) -> bytes:
        """``headers`` are lines that end with CR LF."""
        text = (
            f"{method} {self.prefix}{path} HTTP/1.1\r\nhost: {self.host_header}\r\n{headers}"
            f"content-length: {size}\r\n\r\n"
        )
        return text.encode("latin-1")


class Exchange:
    """One request and its answer.

    Attributes:
        sent_s: time at which it was handed to an idle connection, or the making of a new one began.
        body: the body of an answer that is no stream of events.
        failure, detail: set at the end, of a failure.
    """

    def __init__(
        self, request: list[bytes], on_done: Callable[[Exchange], None], *, expects_events: bool = True
    ) -> None:
        self.request = request
        self._expects_events = expects_events
        self.on_done = on_done
        self.answer = Answer()
        self.sent_s = 0.0
        self.finish_s: float | None = None
        self.status: int | None = None
        self.is_stream = False
        self.body = bytearray()
        self.failure: Failure | None = None
        self.detail = ""
        self.connection: _Connection | None = None
        self.connecting: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None

    def begin(self, status: int, content_type: bytes) -> None:
        self.status = status
        is_good = self._expects_events and 200 <= status < 300
        self.is_stream = is_good and content_type.startswith(b"text/event-stream")

    def feed(self, data: bytes, at_s: float) -> None:
        if self.is_stream:
            self.answer.feed(data, at_s)
        else:
            self.body += data

    def end(self, at_s: float, *, complete: bool, reason: str = "") -> None:
        if self.finish_s is not None:
            return
        answer = self.answer
        if self.status is None:
            self.fail(at_s, Failure.CONNECTION_LOST, reason or "the connection was closed before an answer")
            return
        if not 200 <= self.status < 300:
            answer.failure, answer.detail = Failure.HTTP_STATUS, error_message(bytes(self.body))
        elif not self._expects_events:
            if not complete:
                answer.failure, answer.detail = Failure.CUT_STREAM, reason
        elif not self.is_stream:
            answer.failure = Failure.MALFORMED
            answer.detail = f"the answer is no stream of events: {error_message(bytes(self.body))}"
        else:
            answer.end(complete=complete, reason=reason)
        self._finish(at_s, answer.failure, answer.detail)

    def fail(self, at_s: float, failure: Failure, detail: str) -> None:
        """End the exchange with a failure; an error that came in the stream before stands in its place."""
        if self.finish_s is None:
            earlier = self.answer.failure
            self._finish(at_s, earlier or failure, self.answer.detail if earlier else detail)

    def _finish(self, at_s: float, failure: Failure | None, detail: str) -> None:
        self.finish_s, self.failure, self.detail = at_s, failure, detail
        if self.timer is not None:
            self.timer.cancel()
        self.on_done(self)


class Connections:
    """The connections to one server; there are as many as there are requests on their way."""

    def __init__(self, target: Target, *, timeout_s: float, clock: Callable[[], float] = perf_counter) -> None:
        self.target = target
        self.clock = clock
        self._timeout_s = timeout_s
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()
        self._connecting: set[asyncio.Task[None]] = set()

    def send(self, exchange: Exchange, timeout_s: float | None = None) -> None:
        """Send an exchange; ``timeout_s`` of None stands for the connections' own."""
        loop = asyncio.get_running_loop()
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        exchange.timer = loop.call_later(limit_s, self._time_out, exchange, limit_s)
        exchange.sent_s = self.clock()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable(exchange.sent_s):
                connection.begin(exchange)
                return
            connection.abort()
        task = exchange.connecting = loop.create_task(self._connect(exchange))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def get(self, path: str, headers: str = "", *, timeout_s: float | None = None) -> Exchange:
        """Get a plain answer, whole in ``body``; ``failure`` gives the reason of one that failed."""
        done = asyncio.Event()
        request = [self.target.head("GET", path, headers, 0)]
        exchange = Exchange(request, lambda _: done.set(), expects_events=False)
        self.send(exchange, timeout_s)
        await done.wait()
        return exchange

    async def close(self) -> None:
        """Break off all requests on their way; their senders get no notice."""
        for task in list(self._connecting):
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        for connection in list(self._all):
            connection.forget()
        while self._all:  # noqa: ASYNC110 - connection_lost comes with the next rounds of the loop
            await asyncio.sleep(0.001)

    async def _connect(self, exchange: Exchange) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                connection = await self._open()
        except OSError as error:  # TimeoutError is one
            detail = error.strerror or str(error) or f"no connection in {CONNECT_TIMEOUT_S:g} s"
            exchange.fail(self.clock(), Failure.CONNECT, detail)
            return
        if exchange.finish_s is None:
            connection.begin(exchange)
        else:
            connection.abort()

    async def _open(self) -> _Connection:
        target, addresses = self.target, self.target.addresses
        for number, address in enumerate(addresses, start=1):
            try:
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(self),
                    address,
                    target.port,
                    ssl=target.tls,
                    server_hostname=target.host if target.tls else None,
                )
            except OSError:
                if number == len(addresses):
                    raise
            else:  # a server on 127.0.0.1 alone, though localhost is ::1 as well
                target.addresses, target.address = [address], address
                return connection
        raise AssertionError("a name has an address")

    def _time_out(self, exchange: Exchange, limit_s: float) -> None:
        if exchange.connecting is not None:
            exchange.connecting.cancel()
        connection = exchange.connection
        exchange.fail(self.clock(), Failure.TIMEOUT, f"not finished within {limit_s:g} s")
        if connection is not None:
            connection.forget()

    def opened(self, connection: _Connection) -> None:
        """Note a new connection that has a request.

        A connection whose making was given up before is closed by the event loop and never gets here.
        """
        self._all.add(connection)

    def put_back(self, connection: _Connection) -> None:
        self._idle.append(connection)

    def lost(self, connection: _Connection) -> None:
        self._all.discard(connection)
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)


class _Connection(asyncio.Protocol):
    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._clock = connections.clock
        self._transport: asyncio.Transport
        self._exchange: Exchange | None = None
        self._idle_since_s = 0.0
        self._pieces: list[bytes] = []
        self._content_type = b""
        self._has_end = False  # the head says where the body ends; else the connection's end does
        self._begun = self._ended = False
        self._parser = httptools.HttpResponseParser(
            SimpleNamespace(
                on_header=self._on_header,
                on_headers_complete=self._on_headers_complete,
                on_body=self._pieces.append,
                on_message_complete=self._on_message_complete,
            )
        )

    def is_usable(self, now_s: float) -> bool:
        return not self._transport.is_closing() and now_s - self._idle_since_s < KEEP_ALIVE_S

    def begin(self, exchange: Exchange) -> None:
        self._connections.opened(self)
        self._exchange, exchange.connection = exchange, self
        self._begun = self._ended = self._has_end = False
        self._content_type = b""
        request, exchange.request = exchange.request, []
        self._transport.writelines(request)

    def abort(self) -> None:
        self._transport.abort()

    def forget(self) -> None:
        self._exchange = None
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by name

    def data_received(self, data: bytes) -> None:
        at_s = self._clock()
        exchange = self._exchange
        if exchange is None:  # nobody has asked
            self._transport.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.forget()
            exchange.fail(at_s, Failure.MALFORMED, f"no HTTP: {error}")
            return
        if self._pieces:
            exchange.feed(self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces), at_s)
            self._pieces.clear()
        if self._ended:
            self._exchange = exchange.connection = None
            # An answer before its request was out leaves the rest of the request on the connection.
            if self._parser.should_keep_alive() and not self._transport.get_write_buffer_size():
                self._idle_since_s = at_s
                self._connections.put_back(self)
            else:
                self._transport.abort()
            exchange.end(at_s, complete=True)

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.lost(self)
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.connection = None
            complete = error is None and self._begun and not self._has_end
            exchange.end(self._clock(), complete=complete, reason=str(error) if error else "")

    def _on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self._content_type = value.lower()
        elif name in (b"content-length", b"transfer-encoding"):
            self._has_end = True

    def _on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 and self._exchange is not None:
            self._begun = True
            self._exchange.begin(status, self._content_type)

    def _on_message_complete(self) -> None:
        if self._begun:
            self._ended = True
