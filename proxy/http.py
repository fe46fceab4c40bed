"""HTTP/1.1 as the gateway speaks it."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

#: What a client may send ahead of or behind its body: request line, headers, trailers.
MAX_HEADER_BYTES = 64 * 1024


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's protocol with an end to headers and trailers, which httptools would collect without limit."""

    #: Received since the last piece of a body or the end of a request.
    _collected_bytes = 0

    def data_received(self, data: bytes) -> None:
        self._collected_bytes += len(data)
        super().data_received(data)
        if self._collected_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The headers have more than {MAX_HEADER_BYTES} bytes.")

    def on_body(self, body: bytes) -> None:
        self._collected_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._collected_bytes = 0
        super().on_message_complete()
