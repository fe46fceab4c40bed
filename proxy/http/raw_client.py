"""One request on a connection of ours, from its body to the last byte of its answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Protocol

from epd_serve.errors import ServeError
from proxy.http.arrival import Turn, Turns, buffer
from proxy.http.client import Client, ClientLeft, Header, ResponseAborted, too_large

logger = logging.getLogger(__name__)

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_LAST_CHUNK = b"0\r\n\r\n"
_CHUNKED = (b"transfer-encoding", b"chunked")


class RawEndpoint(Protocol):
    """The endpoint that serves a request."""

    @property
    def max_body_bytes(self) -> int: ...

    async def serve(self, client: Client, headers: Mapping[bytes, bytes]) -> None: ...


class RawClient:
    """:class:`proxy.http.client.Client` over a transport.

    Attributes:
        keep_alive: whether the connection goes on after the answer.
        is_complete: whether the answer is out.
        unread_bytes: what is still to come of the body.
        on_skipped: called when a body that nobody wants has been read to its end.
    """

    __slots__ = (
        "_begin",
        "_body",
        "_body_waiter",
        "_can_write",
        "_default_headers",
        "_head",
        "_is_lost",
        "_on_left",
        "_size",
        "_started",
        "_transport",
        "_turn",
        "_writable",
        "is_complete",
        "keep_alive",
        "loop",
        "on_skipped",
        "unread_bytes",
    )

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
        self.keep_alive = True
        self.is_complete = False
        self.unread_bytes = size - len(begin)
        self.on_skipped: Callable[[], None] | None = None
        self._transport = transport
        self._size = size
        self._default_headers = default_headers
        #: None: it is not kept; empty until more of it can be read than its beginning.
        self._body: bytearray | None = None
        self._begin = begin
        if size <= max_bytes:
            self._body = bytearray() if self.unread_bytes else bytearray(begin)
        self._turn: Turn | None = None
        self._body_waiter: asyncio.Future[None] | None = None
        self._on_left: Callable[[], None] | None = None
        self._is_lost = False
        self._head = b""
        self._started = False
        self._can_write = True
        self._writable: asyncio.Event | None = None

    # Of the connection.

    async def serve(self, endpoint: RawEndpoint, headers: Mapping[bytes, bytes]) -> None:
        """Run the endpoint; whatever goes wrong, the connection learns from ``is_complete`` what became of it."""
        try:
            await endpoint.serve(self, headers)
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
            self.let_go()

    @property
    def has_begun(self) -> bool:
        """Whether something of the answer is out."""
        return self._started

    @property
    def address(self) -> str:
        name = self._transport.get_extra_info("peername")
        return name[0] if isinstance(name, tuple) else ""

    def take_turn(self, turns: Turns) -> None:
        """Read a body that is kept when it is its turn."""
        if self._body is None:
            return
        turn = self._turn = turns.ask(self.loop, self._size, self._transport.resume_reading)
        if not turn.has_begun:
            self._transport.pause_reading()

    def buffer(self) -> memoryview | None:
        """Return the place of the body's next bytes; None: they are not kept."""
        if self._body is None or not self.unread_bytes:
            return None
        if not self._body:
            self._body = buffer(self._size)
            self._body[: len(self._begin)] = self._begin
            self._begin = memoryview(b"")
        return memoryview(self._body)[self._size - self.unread_bytes :]

    def received(self, nbytes: int) -> int:
        """Take bytes that have come; return how many of them belong to the body."""
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

    # Of proxy.http.client.Client.

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

    def let_go(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            if not turn.has_begun:  # it was refused unread
                self._transport.resume_reading()
            turn.end()

    def watch(self, on_left: Callable[[], None]) -> None:
        if self._is_lost:
            on_left()
        else:
            self._on_left = on_left

    def close(self) -> None:
        self._on_left = None

    async def respond(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        if status == HTTPStatus.REQUEST_TIMEOUT:
            self.keep_alive = False  # nobody knows when the rest of the body comes
        self._respond(status, headers, body)

    def start(self, headers: Sequence[Header]) -> None:
        self._head = self._render(200, (*headers, _CHUNKED))

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

    def _respond(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        self._started = self.is_complete = True
        if not self._transport.is_closing():
            self._transport.write(self._render(status, (*headers, (b"content-length", b"%d" % len(body)))) + body)

    def _render(self, status: int, headers: Iterable[Header]) -> bytes:
        lines = [b"%b: %b\r\n" % header for header in (*self._default_headers, *headers)]
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        return b"%b%b\r\n" % (_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status, b"".join(lines))
