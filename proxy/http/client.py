"""The client of one request, whatever server accepted its connection: its body, and its answer in one piece."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Protocol

from epd_serve.errors import ServeError, TooLarge
from proxy.http.arrival import Turn
from proxy.observe.record import RequestRecord

Header = tuple[bytes, bytes]


class ClientLeft(Exception):
    """The client closed its connection before its request was complete."""


class Outlet(Protocol):
    """The receiver of a streamed answer. Writing never waits: ``write`` says when the client cannot keep up."""

    def start(self, headers: Sequence[Header]) -> None:
        """Status 200 and the headers; they go out with the first bytes."""

    def write(self, data: bytes | memoryview, *, last: bool = False) -> bool:
        """Send a part of the answer. Returns False where :meth:`drain` has to come before the next one."""

    async def drain(self) -> None:
        """Wait until the client has taken what was written, or enough of it."""


class Client(Outlet, Protocol):
    """One request's connection.

    Attributes:
        loop: serves the connection.
        address: of the other end, without its port; "" where there is none.
        unread_bytes: of the body; 0: :meth:`body` need not wait.
        turn: in which a large body is read (proxy/http/arrival.py); None: it holds up no other.
        on_left: called when the client is gone before its answer is complete, once it has sent all of its request.
    """

    loop: asyncio.AbstractEventLoop
    address: str
    unread_bytes: int
    turn: Turn | None
    on_left: Callable[[], None] | None

    async def body(self, max_bytes: int) -> bytearray:
        """The whole body. Raises TooLarge as soon as it is known to be, ClientLeft where the client is gone."""

    async def respond(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        """The whole answer in one piece; the length is added to its headers."""

    def let_go(self) -> None:
        """End the turn: the body is not held any more, or will be for long. Any number of times."""


def too_large(max_bytes: int) -> TooLarge:
    return TooLarge(f"the body has more than {max_bytes} bytes, the limit of this gateway")


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


#: The content type of nearly all answers.
JSON = b"application/json"


async def send_json(
    client: Client,
    status: int,
    body: bytes,
    record: RequestRecord,
    retry_after_s: float | None = None,
    *,
    content_type: bytes = JSON,
) -> None:
    """A whole answer."""
    headers = [(b"content-type", content_type), *record.headers]
    headers += [(name.encode(), value.encode()) for name, value in retry_headers(status, retry_after_s).items()]
    if status == 408:  # the rest of the body may still come, and is no request
        headers.append((b"connection", b"close"))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await client.respond(status, headers, body)
