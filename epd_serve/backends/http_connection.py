"""One kept-alive connection to an instance: requests out, answers parsed (llhttp's parser, httptools)."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import httptools

if TYPE_CHECKING:
    from epd_serve.backends.http_call import HttpCall
    from epd_serve.backends.http_client import HttpPool

MAX_HEAD_BYTES = 64 * 1024


class Connection(asyncio.Protocol):
    """Parses answers; one call at a time."""

    def __init__(self, pool: HttpPool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport
        self.idle_since_s = 0.0
        self._call: HttpCall | None = None
        self._headers: dict[bytes, bytes] = {}
        self._pieces: list[bytes] = []
        self._head_bytes = 0
        self._begun = self._ended = self._reusable = self._paused = False
        #: The line by which the first request proves the cluster's key; b"" where there is none to prove.
        self.proof = b""
        self.is_greeting = False
        # A namespace of their own, where the parser finds them without a frame of Python for each piece.
        self._parser = httptools.HttpResponseParser(
            SimpleNamespace(
                on_header=self._headers.__setitem__,
                on_headers_complete=self._on_headers_complete,
                on_body=self._pieces.append,
                on_message_complete=self._on_message_complete,
            )
        )

    def begin(self, call: HttpCall) -> None:
        self._call = call
        call.connection = self
        self._head_bytes = 0
        self._begun = self._ended = False
        request, call.request = call.request, []
        if self.proof:
            request[0] = request[0].removesuffix(b"\r\n") + self.proof + b"\r\n"
            self.proof = b""
        self._transport.writelines(request)

    @property
    def is_closing(self) -> bool:
        return self._transport.is_closing()

    @property
    def peer_address(self) -> tuple[str, int]:
        host, port = self._transport.get_extra_info("peername")[:2]
        return host, port

    def abort(self) -> None:
        self._transport.abort()

    def pause(self) -> None:
        if not self._paused and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by name

    def data_received(self, data: bytes) -> None:
        call = self._call
        if call is None:  # nobody has asked: the server wants to end the connection, or is not in its senses
            self._transport.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._give_up(f"no HTTP answer: {error}")
            return
        if not self._begun:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._give_up(f"the head of its answer has more than {MAX_HEAD_BYTES} bytes")
            return
        if self._pieces:
            call.feed(self._pieces)
        if self._ended and self._call is call:
            self._call = None
            call.end()
            # An answer before its request was out leaves the rest of the request on the connection.
            if self._reusable and not self._transport.get_write_buffer_size():
                self.resume()
                self._pool.put_back(self)
            else:
                self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._pool.lost(self)
        call, self._call = self._call, None
        if call is not None:
            call.fail(call.lost(str(error) if error else "the connection was closed"))

    def _give_up(self, reason: str) -> None:
        call, self._call = self._call, None
        self._transport.abort()
        if call is not None:
            call.fail(call.lost(reason))

    def _on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        headers = {name.lower(): value for name, value in self._headers.items()}
        self._headers.clear()
        if status >= 200 and self._call is not None:
            self._begun = True
            self._call.begin(status, headers)

    def _on_message_complete(self) -> None:
        if self._begun:
            self._ended = True
            self._reusable = self._parser.should_keep_alive()
