"""uvicorn's protocol with limits on the size and time of headers and trailers."""

from __future__ import annotations

import asyncio
import re
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

#: Limit of a request line with its headers, and of trailers.
MAX_HEADER_BYTES = 64 * 1024
#: Time in which a request line with its headers must arrive.
HEADER_S = 10.0
#: How long to read and drop the rest of a refused body, so that its sender reads the answer.
GRACE_S = 10.0


#: The offer to upgrade to HTTP/2, after which httptools would not read the body.
_H2C = re.compile(rb"\r\nupgrade:[ \t]*h2c(?=\r\n|$)", re.IGNORECASE)


class BoundedHttp(HttpToolsProtocol):
    """Closes connections whose headers are too long or too slow, which httptools does not limit.

    Attributes:
        max_body_bytes: limit of a body; None if the application has a limit of its own.
    """

    max_body_bytes: ClassVar[int | None] = None
    #: Received since the last piece of a body or the end of a request.
    _collected_bytes = 0
    _body_bytes = 0
    _in_body = False
    #: The request whose body is still arriving after its answer.
    _refused: RequestResponseCycle | None = None
    #: When the head of a request began; None once complete. One timer checks it, at most once per HEADER_S.
    _head_since_s: float | None = None
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._collected_bytes += len(data)
        if not self._in_body:
            head, end, rest = data.partition(b"\r\n\r\n")
            if _H2C.search(head):  # a server may ignore it (RFC 9110, section 7.8)
                data = _H2C.sub(b"", head) + end + rest
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._collected_bytes > MAX_HEADER_BYTES:
            self.send_400_response(f"The headers exceed {MAX_HEADER_BYTES} bytes.")
        elif self.max_body_bytes is not None and self._body_bytes > self.max_body_bytes:
            self.send_400_response(f"The body exceeds {self.max_body_bytes} bytes.")

    def on_message_begin(self) -> None:
        self._begin_head()
        self._body_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_since_s = None
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

    def _begin_head(self) -> None:
        self._head_since_s = self.loop.time()
        if self._timer is None:
            self._timer = self.loop.call_later(HEADER_S, self._close_if_late)

    def _close_if_late(self) -> None:
        self._timer = None
        if self._head_since_s is None or self.transport.is_closing():
            return
        left_s = self._head_since_s + HEADER_S - self.loop.time()
        if left_s <= 0:
            self.transport.close()
        else:
            self._timer = self.loop.call_later(left_s, self._close_if_late)
