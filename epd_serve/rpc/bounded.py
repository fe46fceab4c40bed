"""uvicorn's protocol with an end to headers and trailers, in bytes and in time."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import ClassVar

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

#: A sender may have this much ahead of or behind its body: request line, headers, trailers.
MAX_HEADER_BYTES = 64 * 1024
#: A request line with its headers comes within this time.
HEADER_S = 10.0
#: The rest of a body that was refused is read and dropped for this time, so that its sender sees the answer.
GRACE_S = 10.0


#: The offer to change to HTTP/2, behind which httptools would read no body.
_H2C = re.compile(rb"\r\nupgrade:[ \t]*h2c(?=\r\n)", re.IGNORECASE)


class HeadWatch(msgspec.Struct, eq=False):
    """Calls ``on_late`` when the head of a request is not complete in time.

    One timer per connection, set anew at most once per ``header_s``.

    Attributes:
        since_s: when the head began; None: it is complete, which is for the connection to say.
    """

    _loop: asyncio.AbstractEventLoop
    _header_s: float
    _on_late: Callable[[], None]
    since_s: float | None = None
    _timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """A connection was made, or the first byte of its next request has come."""
        self.since_s = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._header_s, self._look)

    def stop(self) -> None:
        """The connection is gone."""
        self.since_s = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self.since_s is None:
            return
        left_s = self.since_s + self._header_s - self._loop.time()
        if left_s <= 0:
            self._on_late()
        else:
            self._timer = self._loop.call_later(left_s, self._look)


class BoundedHttp(HttpToolsProtocol):
    """Closes a connection whose headers are too long or come too late; httptools would collect them without limit.

    Attributes:
        max_body_bytes: the connection of a longer body is closed; None: the application bounds bodies.
    """

    max_body_bytes: ClassVar[int | None] = None
    #: Received since the last piece of a body or the end of a request.
    _collected_bytes = 0
    _body_bytes = 0
    _in_body = False
    #: The request whose body still comes behind its answer.
    _refused: RequestResponseCycle | None = None

    @property
    def header_s(self) -> float:
        """Seconds for a request line with its headers."""
        return HEADER_S

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head = HeadWatch(self.loop, self.header_s, self._head_is_late)
        self._head.begin()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head.stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._collected_bytes += len(data)
        if not self._in_body and _H2C.search(data):  # a server may ignore it (RFC 9110, section 7.8)
            head, end, rest = data.partition(b"\r\n\r\n")
            data = _H2C.sub(b"", head) + end + rest
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._collected_bytes > MAX_HEADER_BYTES:
            self.send_400_response(f"The headers have more than {MAX_HEADER_BYTES} bytes.")
        elif self.max_body_bytes is not None and self._body_bytes > self.max_body_bytes:
            self.send_400_response(f"The body has more than {self.max_body_bytes} bytes.")

    def on_message_begin(self) -> None:
        self._head.begin()
        self._body_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head.since_s = None
        self._in_body = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._collected_bytes = 0
        self._body_bytes += len(body)
        if self.cycle.response_complete and self._refused is not self.cycle:
            self._refused = self.cycle
            self.loop.call_later(GRACE_S, self._close_if_refused, self.cycle)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._collected_bytes = 0
        self._in_body = False
        self._refused = None
        super().on_message_complete()

    def _close_if_refused(self, cycle: RequestResponseCycle) -> None:
        if self._refused is cycle and not self.transport.is_closing():
            self.transport.close()

    def _head_is_late(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
