"""The client's side of an answer: JSON or events out, and what may still be said when something fails."""

from __future__ import annotations

import math
from collections.abc import Callable

from epd_serve.errors import ServeError
from proxy.http.client import Client, Outlet
from proxy.observe.record import RequestRecord


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


async def send_error(client: Client, error: ServeError, record: RequestRecord) -> None:
    """An error as the whole answer."""
    await send_json(client, error.status, error.to_json(), record, error.retry_after_s)


async def send_json(
    client: Client, status: int, body: bytes, record: RequestRecord, retry_after_s: float | None = None
) -> None:
    """A whole answer in JSON."""
    headers = [(b"content-type", b"application/json"), *record.headers]
    headers += [(name.encode(), value.encode()) for name, value in retry_headers(status, retry_after_s).items()]
    if status == 408:  # the rest of the body may still come, and is no request
        headers.append((b"connection", b"close"))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await client.respond(status, headers, body)


class EventSink:
    """Forwards whole server-sent events, unparsed; status and headers go out with the first of them.

    Attributes:
        started, ended: whether the first and the last of them were written.
        outlet: where they go; once it has started, what is not the last may be written there.
    """

    __slots__ = ("_on_start", "_record", "ended", "outlet", "started")

    def __init__(
        self, outlet: Outlet, record: RequestRecord, on_start: Callable[[RequestRecord], None] = lambda _: None
    ) -> None:
        """``on_start`` is called with the first event."""
        self.outlet = outlet
        self._record = record
        self._on_start = on_start
        self.started = self.ended = False

    def redirect(self, outlet: Outlet) -> None:
        assert not self.started
        self.outlet = outlet

    def write(self, events: bytes | memoryview, *, last: bool = False) -> bool:
        """Returns False where :meth:`drain` has to come before the next events. ``last``: these are all."""
        if not self.started:
            self.started = True
            self._on_start(self._record)
            self.outlet.start((*_HEADERS, *self._record.headers))
        self.ended = last
        return self.outlet.write(events, last=last)

    async def drain(self) -> None:
        """Wait until the client can take more."""
        await self.outlet.drain()

    async def finish(self) -> None:
        if not self.ended:
            self.outlet.write(b"", last=True)
        await self.outlet.drain()

    async def fail(self, error: ServeError) -> None:
        """Tell the client what happened. The caller aborts the connection."""
        self.write(b"data: " + error.to_json() + b"\n\n")
        await self.outlet.drain()


_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
)
