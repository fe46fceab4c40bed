"""The load tester's requests: one attempt each, and times where bytes leave and come."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from time import perf_counter
from urllib.parse import urlsplit

from epd_serve.bench.answer import Answer, error_message
from epd_serve.bench.types import Failure
from epd_serve.rpc.http import Connection, HttpCall, HttpPool

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
        #: With which all paths begin.
        self.base = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ValueError(f"{self.host}: {error.strerror or error}; is --base-url right?") from error
        self.addresses = list(dict.fromkeys(str(one[4][0]) for one in found))
        self.address = self.addresses[0]


class Exchange(HttpCall):
    """One request and its answer.

    Attributes:
        sent_s: time at which it was handed to an idle connection, or the making of a new one began.
        body: the body of an answer that is no stream of events.
        failure, detail: set at the end, of a failure.
    """

    def __init__(
        self,
        connections: Connections,
        method: str,
        path: str,
        headers: str,
        on_done: Callable[[Exchange], None],
        body: bytes = b"",
        *,
        expects_events: bool = True,
    ) -> None:
        super().__init__(connections, method, path, headers, [body] if body else [])
        self._connections = connections
        self._expects_events = expects_events
        self._on_done = on_done
        self.answer = Answer()
        self.sent_s = 0.0
        self.finish_s: float | None = None
        self.is_stream = False
        self.body = bytearray()
        self.failure: Failure | None = None
        self.detail = ""
        self.timer: asyncio.TimerHandle | None = None

    def begin(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.status, self._headers = status, headers
        is_good = self._expects_events and 200 <= status < 300
        self.is_stream = is_good and self.headers.get(b"content-type", b"").lower().startswith(
            b"text/event-stream"
        )

    def receive(self, data: bytes) -> None:
        at_s = perf_counter()
        if self.is_stream:
            self.answer.feed(data, at_s)
        else:
            self.body += data

    def end(self) -> None:
        self.connection = None
        self._end(complete=True)

    def cut(self, reason: str, *, is_http: bool = True) -> None:
        self.connection = None
        if self._connections.is_closed:
            return
        if not is_http:
            self.give_up(Failure.MALFORMED, f"no HTTP: {reason}")
            return
        has_end = b"content-length" in self.headers or b"transfer-encoding" in self.headers
        self._end(complete=not (reason or has_end), reason=reason)  # else the connection's end is the body's

    def unreachable(self, error: OSError) -> None:
        detail = error.strerror or str(error) or f"no connection in {CONNECT_TIMEOUT_S:g} s"
        self.give_up(Failure.CONNECT, detail)

    def _end(self, *, complete: bool, reason: str = "") -> None:
        answer = self.answer
        if self.finish_s is not None:
            return
        if not self.status:
            self.give_up(Failure.CONNECTION_LOST, reason or "the connection was closed before an answer")
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
        self._finish(answer.failure, answer.detail)

    def give_up(self, failure: Failure, detail: str) -> None:
        """End the exchange with a failure; an error that came in the stream before stands in its place."""
        if self.finish_s is None:
            earlier = self.answer.failure
            self._finish(earlier or failure, self.answer.detail if earlier else detail)

    def _finish(self, failure: Failure | None, detail: str) -> None:
        self.finish_s, self.failure, self.detail = perf_counter(), failure, detail
        if self.timer is not None:
            self.timer.cancel()
        self._on_done(self)


class Connections(HttpPool):
    """The connections to one server; there are as many as there are requests on their way."""

    def __init__(self, target: Target, *, timeout_s: float) -> None:
        super().__init__("server", target.base)
        self.target = target
        self._timeout_s = timeout_s
        self.is_closed = False

    def begin(self, exchange: Exchange, timeout_s: float | None = None) -> None:
        """Send an exchange; ``timeout_s`` of None stands for the connections' own."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        exchange.timer = self.loop.call_later(limit_s, self._time_out, exchange, limit_s)
        exchange.sent_s = perf_counter()
        exchange.send()

    async def get(self, path: str, headers: str = "", *, timeout_s: float | None = None) -> Exchange:
        """Get a plain answer, whole in ``body``; ``failure`` gives the reason of one that failed."""
        done = asyncio.Event()
        exchange = Exchange(self, "GET", path, headers, lambda _: done.set(), expects_events=False)
        self.begin(exchange, timeout_s)
        await done.wait()
        return exchange

    async def close(self) -> None:
        """Break off all requests on their way; their senders get no notice."""
        self.is_closed = True
        await super().close()

    async def open(self) -> Connection:
        target, addresses = self.target, self.target.addresses
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            for number, address in enumerate(addresses, start=1):
                try:
                    _, connection = await self.loop.create_connection(
                        lambda: Connection(self),
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
        exchange.give_up(Failure.TIMEOUT, f"not finished within {limit_s:g} s")
        exchange.close()
