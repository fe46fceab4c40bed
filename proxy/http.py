"""HTTP/1.1 as the gateway speaks it."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from proxy.arrival import ArrivalLimits, HeadWatch

#: What a client may send ahead of or behind its body: request line, headers, trailers.
MAX_HEADER_BYTES = 64 * 1024


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
