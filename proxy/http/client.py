"""The client of one request, whatever server has accepted its connection: body in, answer out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from starlette.types import Receive, Scope, Send

from epd_serve.errors import TooLarge

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
    """One request's connection."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that serves the connection."""

    @property
    def address(self) -> str:
        """The other end's, without its port; "" where there is none."""

    @property
    def has_body(self) -> bool:
        """Whether :meth:`body` need not wait."""

    async def body(self, max_bytes: int) -> bytearray:
        """The whole body. Raises TooLarge as soon as it is known to be, ClientLeft where it ends early."""

    async def respond(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        """The whole answer in one piece; the length is added to its headers."""

    def let_go(self) -> None:
        """The body is not held any more, or will be for long: others' may be read. Any number of times."""

    def watch(self, on_left: Callable[[], None]) -> None:
        """Call ``on_left`` when the client is gone before :meth:`close`."""

    def close(self) -> None:
        """The answer is complete, or will not be."""


def headers_of(scope: Scope) -> dict[bytes, bytes]:
    """By name in lower case; the first of several with one name."""
    return dict(reversed(scope["headers"]))


def too_large(max_bytes: int) -> TooLarge:
    return TooLarge(f"the body has more than {max_bytes} bytes, the limit of this gateway")


class AsgiClient:
    """:class:`Client` over ASGI."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._headers = headers_of(scope)
        self.address: str = (scope.get("client") or ("",))[0]
        self.loop = asyncio.get_running_loop()
        self._receive = receive
        self._send = send
        self._watcher: asyncio.Task[None] | None = None
        self._start: Sequence[Header] | None = None
        self._written: list[bytes | memoryview] = []
        self._ended = False
        self._sending = asyncio.Lock()

    @property
    def has_body(self) -> bool:
        return False

    async def body(self, max_bytes: int) -> bytearray:
        declared = self._headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > max_bytes:
            raise too_large(max_bytes)
        body = bytearray()
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            body += message.get("body", b"")
            if len(body) > max_bytes:
                raise too_large(max_bytes)
            more = message.get("more_body", False)
        return body

    async def respond(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        headers = [*headers, (b"content-length", b"%d" % len(body))]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def start(self, headers: Sequence[Header]) -> None:
        self._start = headers

    def write(self, data: bytes | memoryview, *, last: bool = False) -> bool:
        self._written.append(data)
        self._ended = last
        return False

    async def drain(self) -> None:
        async with self._sending:  # several answers may share a stream
            if self._start is not None:
                headers, self._start = self._start, None
                await self._send({"type": "http.response.start", "status": 200, "headers": list(headers)})
            written, self._written = self._written, []
            if written:
                await self._send({"type": "http.response.body", "body": b"".join(written), "more_body": True})
                if self._ended:
                    await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def let_go(self) -> None:
        pass

    def watch(self, on_left: Callable[[], None]) -> None:
        async def until_left() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            on_left()  # or, says ASGI, the answer is complete

        self._watcher = asyncio.create_task(until_left())

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
