"""The client of one request over ASGI: read its body, send a streamed or whole answer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import ClassVar, Protocol

import msgspec
from starlette.types import Receive, Scope, Send

from epd_serve.errors import InvalidRequest, ServeError, TooLarge
from proxy.observe.record import RequestRecord
from proxy.tasks import Interruption

Header = tuple[bytes, bytes]
JSON = b"application/json"


class ClientLeft(Exception):
    """The client closed its connection before its answer was complete."""


class TooSlow(InvalidRequest):
    """The body did not arrive in time; the connection cannot be reused."""

    status: ClassVar[int] = 408
    default_code: ClassVar[str | None] = "request_timeout"


class ResponseAborted(Exception):
    """A streamed answer broke off.

    Raised out of the ASGI application, it makes the server close the connection without a terminating chunk, so
    that no client takes the part for the whole.
    """


class Outlet(Protocol):
    """Receives a streamed answer. ``write`` never waits; it returns False if the client cannot keep up."""

    def start(self, headers: Sequence[Header]) -> None:
        """Set the headers, which are sent with status 200 and the first bytes."""

    def write(self, data: bytes | memoryview, *, last: bool = False) -> bool:
        """Send a part of the answer; return False if :meth:`drain` must follow."""

    async def drain(self) -> None:
        """Wait until the client can receive more."""


def headers_of(scope: Scope) -> dict[bytes, bytes]:
    """Return a request's headers by lower-case name; the first one wins."""
    return dict(reversed(scope["headers"]))


class Client:
    """The client of one request; an :class:`Outlet`.

    Attributes:
        running: interrupts the answer if the client leaves.
        answered: the end of the answer has been sent; a client that leaves now misses nothing.
    """

    def __init__(self, headers: dict[bytes, bytes], receive: Receive, send: Send, record: RequestRecord) -> None:
        self.headers = headers
        self.loop = asyncio.get_running_loop()
        self.record = record
        self.running: Interruption | None = None
        self.answered = False
        self._receive = receive
        self._send = send
        self._watcher: asyncio.Task[None] | None = None
        self._start: Sequence[Header] | None = None
        self._written: list[bytes | memoryview] = []
        self._has_begun = self._ended = False
        self._sending = asyncio.Lock()

    async def body(self, max_bytes: int) -> bytearray:
        """Return the whole body. Raises TooLarge or ClientLeft."""
        declared = self.headers.get(b"content-length", b"")
        is_too_large = declared.isdigit() and int(declared) > max_bytes
        body = bytearray()
        more = True
        while more and not is_too_large:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            body += message.get("body", b"")
            is_too_large = len(body) > max_bytes
            more = message.get("more_body", False)
        if is_too_large:
            raise TooLarge(f"the body has more than {max_bytes} bytes, the limit of this gateway")
        self._watcher = self.loop.create_task(self._watch())
        return body

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self.answered and self.running is not None:
            self.running.fire(ClientLeft())

    async def send_error(self, error: ServeError) -> None:
        body = error.body()
        if self.record.endpoint in ("messages", "count_tokens"):  # Anthropic's form
            body["type"] = "error"
        await self.send_json(error.status, msgspec.json.encode(body), retry_after_s=error.retry_after_s)

    async def send_json(
        self, status: int, body: bytes, *, content_type: bytes = JSON, retry_after_s: float | None = None
    ) -> None:
        headers = [(b"content-type", content_type), *self.record.headers, (b"content-length", b"%d" % len(body))]
        headers += [
            (name.encode(), value.encode()) for name, value in retry_headers(status, retry_after_s).items()
        ]
        if status == 408:  # the rest of the body may still arrive
            headers.append((b"connection", b"close"))
        if status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def start(self, headers: Sequence[Header]) -> None:
        self._start = headers

    def write(self, data: bytes | memoryview, *, last: bool = False) -> bool:
        self._ended = last
        if self._has_begun and not (last or self._written or self._sending.locked()) and self._send_now(data):
            return True
        self._written.append(data)
        return False

    def _send_now(self, data: bytes | memoryview) -> bool:
        """Send a part of the answer unless that would wait; the hot path of every token."""
        sending = self._send({"type": "http.response.body", "body": data, "more_body": True}).__await__()
        try:
            next(sending)
        except StopIteration:
            return True
        sending.close()  # the client reads slowly: the server waits before it writes, so nothing was sent
        return False

    async def drain(self) -> None:
        async with self._sending:  # several prompts may share a stream
            if self._start is not None:
                headers, self._start, self._has_begun = self._start, None, True
                await self._send({"type": "http.response.start", "status": 200, "headers": list(headers)})
            written, self._written = self._written, []
            if written:
                await self._send({"type": "http.response.body", "body": b"".join(written), "more_body": True})
                if self._ended:
                    self.answered = True  # the server reports a disconnect once it has the end
                    await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def close(self) -> None:
        """Stop watching for a disconnect."""
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None  # its exception refers to this client: a reference cycle


#: Default and longest wait before another try.
RETRY_AFTER_S, MAX_RETRY_AFTER_S = 2, 600


def retry_headers(status: int, retry_after_s: float | None = None) -> dict[str, str]:
    """Return ``Retry-After`` in whole seconds (RFC 9110, section 10.2.3) if another try may help."""
    if status not in (429, 503):
        return {}
    seconds = RETRY_AFTER_S if retry_after_s is None else min(math.ceil(retry_after_s), MAX_RETRY_AFTER_S)
    return {"retry-after": str(max(1, seconds))}
