"""One request on a connection of ours, from its body to the last byte of its answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from http import HTTPStatus
from typing import Any, Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from epd_serve.errors import ServeError
from proxy.client import EXTENSION, ClientLeft, Header, too_large
from proxy.sink import ResponseAborted

logger = logging.getLogger(__name__)

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_LAST_CHUNK = b"0\r\n\r\n"


class RawEndpoint(Protocol):
    """An ASGI application that takes its body from :class:`proxy.client.Client`."""

    @property
    def max_body_bytes(self) -> int: ...

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class RawClient:
    """:class:`proxy.client.Client` over a transport, and ASGI's ``send`` for answers in one piece.

    Attributes:
        extensions: of the request's ASGI scope.
        keep_alive: whether the connection goes on after the answer.
        is_complete: whether the answer is out.
        unread_bytes: what is still to come of the body.
        on_skipped: called when a body that nobody wants has been read to its end.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        size: int,
        begin: memoryview,
        *,
        loop: asyncio.AbstractEventLoop,
        max_bytes: int,
        default_headers: Sequence[Header],
    ) -> None:
        """``begin`` is what has come of the body, whose length is ``size``."""
        self.loop = loop
        self.extensions = {EXTENSION: self}
        self.keep_alive = True
        self.is_complete = False
        self.unread_bytes = size - len(begin)
        self.on_skipped: Callable[[], None] | None = None
        self._transport = transport
        self._size = size
        self._default_headers = default_headers
        self._body: bytearray | None = None
        if size <= max_bytes:
            if self.unread_bytes:
                self._body = bytearray(size)
                self._body[: len(begin)] = begin
            else:
                self._body = bytearray(begin)
        self._body_waiter: asyncio.Future[None] | None = None
        self._on_left: Callable[[], None] | None = None
        self._is_lost = False
        self._head = b""
        self._started = self._chunked = False
        self._can_write = True
        self._writable: asyncio.Event | None = None

    # Of the connection.

    async def serve(self, endpoint: ASGIApp, scope: Scope) -> None:
        """Run the endpoint; whatever goes wrong, the connection learns from ``is_complete`` what became of it."""
        try:
            await endpoint(scope, _nothing, self.send)
        except ResponseAborted:
            pass
        except Exception as error:
            logger.exception("a request failed")
            if not self._started:
                problem = ServeError(f"an error inside the gateway: {type(error).__name__}").to_json()
                # The client must not send its next request here.
                self.keep_alive = False
                self._respond(500, [(b"content-type", b"application/json")], problem)
        finally:
            self._body = None
            self._on_left = None
            self.extensions.clear()  # no cycle is left for the collector

    def buffer(self) -> memoryview | None:
        """Where the next bytes of the body belong; None: they are not kept."""
        if self._body is None or not self.unread_bytes:
            return None
        return memoryview(self._body)[self._size - self.unread_bytes :]

    def received(self, nbytes: int) -> int:
        """How many of the bytes that have come belong to the body."""
        taken = min(nbytes, self.unread_bytes)
        if taken:
            self.unread_bytes -= taken
            if not self.unread_bytes:
                if self._body_waiter is not None and not self._body_waiter.done():
                    self._body_waiter.set_result(None)
                if self.on_skipped is not None:
                    self.on_skipped()
        return taken

    def lost(self) -> None:
        self._is_lost = True
        if self._body_waiter is not None and not self._body_waiter.done():
            self._body_waiter.set_result(None)
        if self._on_left is not None and not self.is_complete:
            self._on_left()
        self.resume()

    def pause(self) -> None:
        self._can_write = False
        self._writable = asyncio.Event()

    def resume(self) -> None:
        self._can_write = True
        if self._writable is not None:
            self._writable.set()

    # Of proxy.client.Client.

    @property
    def has_body(self) -> bool:
        return self._body is None or not self.unread_bytes

    async def body(self, max_bytes: int) -> bytearray:
        if self._body is None:
            raise too_large(max_bytes)
        if self.unread_bytes and not self._is_lost:
            self._body_waiter = self.loop.create_future()
            await self._body_waiter
        if self.unread_bytes:
            raise ClientLeft
        body, self._body = self._body, None
        return body

    def watch(self, on_left: Callable[[], None]) -> None:
        if self._is_lost:
            on_left()
        else:
            self._on_left = on_left

    def close(self) -> None:
        self._on_left = None

    def start(self, headers: list[Header]) -> None:
        self._chunked = True
        self._head = self._render(200, [*headers, (b"transfer-encoding", b"chunked")])

    def write(self, data: bytes | memoryview, *, last: bool = False) -> bool:
        out = b"%x\r\n%b\r\n" % (len(data), bytes(data)) if data else b""
        if last:
            out += _LAST_CHUNK
            self.is_complete = True
        if self._head:
            out, self._head = self._head + out, b""
            self._started = True
        if not self._transport.is_closing():
            self._transport.write(out)
        return self._can_write

    async def drain(self) -> None:
        if self.is_complete:
            return  # the connection waits for its reader, the request need not
        if not self._can_write and self._writable is not None and not self._transport.is_closing():
            await self._writable.wait()

    # ASGI.

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = list(message["headers"])
            if message["status"] == HTTPStatus.REQUEST_TIMEOUT:
                self.keep_alive = False  # nobody knows when the rest of the body comes
            self._chunked = not any(name.lower() == b"content-length" for name, _ in headers)
            if self._chunked:
                headers.append((b"transfer-encoding", b"chunked"))
            self._head = self._render(message["status"], headers)
            return
        more = message.get("more_body", False)
        if self._chunked:
            self.write(message.get("body", b""), last=not more)
        else:
            head, self._head = self._head, b""
            self._started = True
            self._send(head + message.get("body", b""))
            self.is_complete = not more
        await self.drain()

    def _respond(self, status: int, headers: list[Header], body: bytes) -> None:
        length = (b"content-length", str(len(body)).encode())
        self._started = True
        self._send(self._render(status, [*headers, length]) + body)
        self.is_complete = True

    def _render(self, status: int, headers: Iterable[Header]) -> bytes:
        lines = [b"%b: %b\r\n" % header for header in (*self._default_headers, *headers)]
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        return b"%b%b\r\n" % (_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status, b"".join(lines))

    def _send(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)


async def _nothing() -> MutableMapping[str, Any]:
    raise RuntimeError("the body is in the client")
