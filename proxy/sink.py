"""The client's side of an answer: ASGI messages out, and what may still be said when something fails."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from starlette.types import Send

from epd_serve.errors import InstanceFailed, ServeError
from epd_serve.protocol.wire import REQUEST_ID_HEADER
from proxy.client import Client

_END_OF_EVENT = b"\n\n"
_DONE = b"data: [DONE]\n\n"
_ERROR = re.compile(rb'data: ?\{ ?"error"')


class ResponseAborted(Exception):
    """A streamed answer broke off: raised out of the ASGI application, it makes the server close the connection
    without a terminating chunk, so that no client takes what it has for the whole answer."""


#: What a client is told to wait before it comes back to a gateway that has no instance or no room for it.
RETRY_AFTER_S = 2


#: Estimates beyond this say no more than "much later".
MAX_RETRY_AFTER_S = 600


def retry_headers(status: int, retry_after_s: float | None = None) -> dict[str, str]:
    """``Retry-After`` where trying again later may help; in whole seconds (RFC 9110, section 10.2.3)."""
    if status not in (429, 503):
        return {}
    seconds = RETRY_AFTER_S if retry_after_s is None else min(math.ceil(retry_after_s), MAX_RETRY_AFTER_S)
    return {"retry-after": str(max(1, seconds))}


async def send_error(send: Send, error: ServeError, trace_id: str) -> None:
    """An error as the whole answer."""
    await send_json(send, error.status, error.to_json(), trace_id, error.retry_after_s)


async def send_json(
    send: Send, status: int, body: bytes, trace_id: str, retry_after_s: float | None = None
) -> None:
    """A whole answer in JSON."""
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (REQUEST_ID_HEADER.encode(), trace_id.encode()),
    ]
    headers += [(name.encode(), value.encode()) for name, value in retry_headers(status, retry_after_s).items()]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


class EventSink:
    """Forwards server-sent events as they come, unparsed; status and headers go out with the first of them.

    Only whole events are forwarded: bytes after the last empty line wait for the rest of their event, so that an
    error event can be put behind them at any time.
    """

    def __init__(self, client: Client, trace_id: str, on_start: Callable[[], None] = lambda: None) -> None:
        """``on_start`` is called with the first event."""
        self._client = client
        self._trace_id = trace_id
        self._on_start = on_start
        self._pending = b""
        self._last = b""
        self.started = False

    def write(self, chunk: bytes) -> bool:
        """Returns False where :meth:`drain` has to come before the next chunk."""
        if self._pending:
            chunk = self._pending + chunk
            self._pending = b""
        if not chunk.endswith(_END_OF_EVENT):
            end = chunk.rfind(_END_OF_EVENT)
            end = 0 if end < 0 else end + len(_END_OF_EVENT)
            chunk, self._pending = chunk[:end], chunk[end:]
        return self._forward(chunk) if chunk else True

    async def drain(self) -> None:
        """Wait until the client can take more."""
        await self._client.drain()

    def restart(self) -> None:
        """Forget what an attempt left behind that broke off within its first event."""
        assert not self.started, "what was sent cannot be taken back"
        self._pending = b""

    def check_complete(self) -> None:
        """Raises InstanceFailed unless the last event was ``[DONE]``; a clean end alone proves nothing."""
        if self._pending or not self._last.endswith(_DONE):
            raise InstanceFailed("the instance ended its answer before it was complete")

    async def finish(self) -> None:
        self._client.write(b"", last=True)
        await self._client.drain()

    async def fail(self, error: ServeError) -> None:
        """Tell the client what happened, unless the instance already has. The caller aborts the connection."""
        if not self.ends_in_error:
            self._forward(b"data: " + error.to_json() + _END_OF_EVENT)
            await self._client.drain()

    @property
    def ends_in_error(self) -> bool:
        """Whether the last event forwarded was an error."""
        start = self._last.rfind(_END_OF_EVENT, 0, -len(_END_OF_EVENT))
        return _ERROR.match(self._last, 0 if start < 0 else start + len(_END_OF_EVENT)) is not None

    def _forward(self, events: bytes) -> bool:
        if not self.started:
            self.started = True
            self._on_start()
            self._client.start([*_HEADERS, (REQUEST_ID_HEADER.encode(), self._trace_id.encode())])
        self._last = events
        return self._client.write(events)


_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
)
