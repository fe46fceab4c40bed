"""The client's side of an answer: ASGI messages out, and what may still be said when something fails."""

from __future__ import annotations

import math

from starlette.types import Send

from epd_serve.errors import ServeError
from proxy.trail import Trail


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


async def send_error(send: Send, error: ServeError, trail: Trail) -> None:
    """An error as the whole answer."""
    await send_json(send, error.status, error.to_json(), trail, error.retry_after_s)


async def send_json(
    send: Send, status: int, body: bytes, trail: Trail, retry_after_s: float | None = None
) -> None:
    """A whole answer in JSON."""
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *trail.headers,
    ]
    headers += [(name.encode(), value.encode()) for name, value in retry_headers(status, retry_after_s).items()]
    if status == 408:  # the rest of the body may still come, and is no request
        headers.append((b"connection", b"close"))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


class EventSink:
    """Forwards whole server-sent events, unparsed; status and headers go out with the first of them."""

    def __init__(self, send: Send, trail: Trail) -> None:
        self._send = send
        self._trail = trail
        self.started = False

    async def write(self, events: bytes | memoryview) -> None:
        if not self.started:
            self.started = True
            await self._send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [
                        (b"content-type", b"text/event-stream; charset=utf-8"),
                        (b"cache-control", b"no-cache"),
                        (b"x-accel-buffering", b"no"),  # nginx would hold events back
                        *self._trail.headers,
                    ],
                }
            )
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def finish(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, error: ServeError) -> None:
        """Tell the client what happened. The caller aborts the connection."""
        await self.write(b"data: " + error.to_json() + b"\n\n")
