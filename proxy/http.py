"""HTTP/1.1 as the gateway speaks it."""

from __future__ import annotations

import asyncio
import re
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from proxy.arrival import ArrivalLimits, HeadWatch

#: What a client may send ahead of or behind its body: request line, headers, trailers.
MAX_HEADER_BYTES = 64 * 1024
#: The plainest request with a body: its beginning; its head, with path and header lines.
PLAIN_START = b"POST /"
PLAIN_HEAD = re.compile(
    rb"POST (/[!-~]*) HTTP/1\.1\r\n((?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*\r\n)+)\r\n"
)


def arrival_limits(app: Any) -> ArrivalLimits:
    """Those of an application that has some, at ``app.state.arrival``."""
    limits = getattr(getattr(app, "state", None), "arrival", None)
    return limits if isinstance(limits, ArrivalLimits) else ArrivalLimits()


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's protocol with an end to headers and trailers: in bytes, which httptools would collect without
    limit, and in time."""

    #: Received since the last piece of a body or the end of a request.
    _collected_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head = HeadWatch(self.loop, arrival_limits(self.config.app).header_s, self._head_is_late)
        self._head.begin()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head.stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._collected_bytes += len(data)
        super().data_received(data)
        if self._collected_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The headers have more than {MAX_HEADER_BYTES} bytes.")

    def on_message_begin(self) -> None:
        self._head.begin()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head.complete()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._collected_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._collected_bytes = 0
        super().on_message_complete()

    def _head_is_late(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()


class Owner(Protocol):
    """Who had a connection before uvicorn."""

    def take_back(self, data: bytes) -> None:
        """A plain POST begins with ``data``."""


class ReturningHttp(BoundedHttp):
    """Gives the connection back to its ``owner`` where it may."""

    owner: Owner
    _made = False
    #: Between two requests.
    _between = True

    def take_over(self, transport: asyncio.Transport) -> None:
        if self._made:
            self.connections.add(self)
        else:
            self._made = True
            self.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if (
            self._between
            and data.startswith(PLAIN_START)
            and (self.cycle is None or self.cycle.response_complete)
            and not self.pipeline
            and not self.flow.write_paused  # that it may write again is told to who has the connection
            and PLAIN_HEAD.match(data) is not None
        ):
            self._unset_keepalive_if_required()
            self.connections.discard(self)
            self._head.stop()
            self.owner.take_back(data)
        else:
            self.feed(data)

    def feed(self, data: bytes) -> None:
        self._between = False
        super().data_received(data)

    def on_message_begin(self) -> None:
        self._between = False
        super().on_message_begin()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._between = True
