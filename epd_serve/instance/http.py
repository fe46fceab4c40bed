"""The control server's plumbing: a few POST routes over plain ASGI, where a closed connection cancels the work."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from epd_serve.errors import PEER_UNREACHABLE, InstanceFailed, InstanceLost, InvalidRequest, ServeError
from epd_serve.protocol import wire
from epd_serve.rpc import streams
from epd_serve.rpc.cluster import CLUSTER_KEY, ClusterLinks, cluster_key, is_proved, with_link
from epd_serve.rpc.http import HttpCall, HttpPool
from epd_serve.rpc.streams import WRITE, UpgradableHttp, upgrade
from epd_serve.rpc.tls import tls_files

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
Header = tuple[bytes, bytes]

JSON = (b"content-type", b"application/json")
#: For whoever starts the instance, and for Prometheus. Bodies are not read: anybody could fill memory with one.
_OPEN = frozenset({"/health", "/health/live", "/metrics"})
#: As uvicorn hands them on, of up to 64 KiB each.
_MANY_PIECES = 16


class Pieces:
    """A streamed answer as it comes. One reader iterates over it, or takes it by :meth:`forward`."""

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._write: Callable[[bytes], None] | None = None
        self._news = asyncio.Event()  # cleared by the one who waits for it
        self._is_over = False
        self._error: Exception | None = None
        self.has_begun = False

    def put(self, piece: bytes) -> None:
        """Add a piece, which may not be empty. Nothing happens behind the end."""
        self.has_begun = True
        if self._write is not None:
            self._write(piece)
        elif not self._is_over:
            self._held.append(piece)
            self._news.set()

    def end(self, error: Exception | None = None) -> None:
        """Let the reader have what there is, then ``error`` if there is one. Only the first end counts."""
        if not self._is_over:
            self._is_over, self._error, self._write = True, error, None
            self._news.set()

    async def wait(self) -> None:
        """Return when there is something to read. Raises the error of an answer that has nothing else."""
        while not self._held and not self._is_over:
            self._news.clear()
            await self._news.wait()
        if not self._held and self._error is not None:
            raise self._error

    async def forward(self, write: Callable[[bytes], None]) -> None:
        """Hand each piece to ``write`` when it comes, until the last one. Raises the error behind it."""
        held, self._held = self._held, []
        for piece in held:
            write(piece)
        if not self._is_over:
            self._write = write
            try:
                self._news.clear()
                await self._news.wait()
            finally:
                self._write = None
        if self._error is not None:
            raise self._error

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self.read()

    async def read(self) -> AsyncGenerator[bytes, None]:
        while True:
            await self.wait()
            held, self._held = self._held, []
            if not held:
                return
            for piece in held:
                yield piece


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """An answer: a body in one piece, or pieces as they come and the body behind them.

    ``on_close`` is called exactly once, when the answer is out or the caller is gone.
    """

    status: int = 200
    headers: tuple[Header, ...] = ()
    body: bytes = b""
    stream: AsyncGenerator[bytes, None] | Pieces | None = None
    on_close: Callable[[], None] | None = None


Handler = Callable[[bytes], Awaitable[Reply]]


class ControlHttp(UpgradableHttp):
    """uvicorn's protocol, which knows for each connection whether the cluster's key was proved on it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.app_state = with_link(self.app_state)
        super().connection_made(transport)


def control_server_app(
    routes: Iterable[tuple[str, str, Handler]], key: str | None, own_address: Callable[[], str]
) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """An instance's control calls, for callers that prove ``key`` if there is one.

    ``own_address``: that the instance tells others (``host:port``).
    """
    app = ControlApp(routes, guarded=key is not None)
    return app if key is None else ClusterLinks(app, key, "instance", own_address)


class ControlApp:
    """ASGI application of an instance: (method, path) → handler of the body.

    Where it is ``guarded``, callers must have proved the cluster's key (:mod:`epd_serve.rpc.cluster`), but for
    what everybody may see.
    """

    def __init__(self, routes: Iterable[tuple[str, str, Handler]], *, guarded: bool = False) -> None:
        self._routes = {(method, path): handler for method, path, handler in routes}
        self._guarded = guarded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        if self._guarded and scope["path"] not in _OPEN and not is_proved(scope):
            await _send_error(
                send,
                InvalidRequest(f"this instance asks for its deployment's cluster_key: set {CLUSTER_KEY}"),
                status=401,
            )
            return
        if scope["path"] == streams.PATH and scope["method"] == "GET":
            if not upgrade(scope, self):
                refusal = InvalidRequest(f"this instance speaks {streams.PROTOCOL}")
                await _send_error(send, refusal, status=426)
            return
        handler = self._routes.get((scope["method"], scope["path"]))
        if handler is None:
            await _send_error(send, InvalidRequest(f"there is no {scope['method']} {scope['path']}"), status=404)
            return
        body = b"" if scope["path"] in _OPEN else await _read(receive)
        if body is None:
            return
        write = scope.get("extensions", {}).get(WRITE)
        work = asyncio.create_task(_run(handler, body, send, write))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            work.cancel()
            with suppress(asyncio.CancelledError):
                await gone
            with suppress(asyncio.CancelledError):
                await work


async def _run(handler: Handler, body: bytes, send: Send, write: Callable[[bytes], None] | None) -> None:
    """Answer a call. ``write`` takes a part of the answer's body at once, where the server has such a thing."""
    try:
        reply = await handler(body)
    except ServeError as error:
        await _send_error(send, error)
        return
    except ValueError as error:  # msgspec names the wrong field
        await _send_error(send, InvalidRequest(str(error)))
        return
    except Exception:  # the caller must hear of it, whatever it was
        logger.exception("a control call failed")
        await _send_error(send, ServeError("the instance failed; its log says more"))
        return
    try:
        await send({"type": "http.response.start", "status": reply.status, "headers": list(reply.headers)})
        stream = reply.stream
        if isinstance(stream, Pieces) and write is not None:
            await stream.forward(write)
        elif stream is not None:
            async with aclosing(stream.read() if isinstance(stream, Pieces) else stream) as pieces:
                async for piece in pieces:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": reply.body})
    finally:
        if reply.on_close is not None:
            reply.on_close()


async def _send_error(send: Send, error: ServeError, status: int | None = None) -> None:
    await send({"type": "http.response.start", "status": status or error.status, "headers": [JSON]})
    await send({"type": "http.response.body", "body": error.to_json()})


async def _read(receive: Receive) -> bytes | None:
    """The whole body; None where the caller left before sending all of it."""
    pieces: list[bytes] = []
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            return None
        pieces.append(event.get("body", b""))
        if not event.get("more_body", False):
            # bytes.join() lets go of the interpreter for large bodies; in a thread the event loop gains by it
            large = len(pieces) > _MANY_PIECES
            return await asyncio.to_thread(b"".join, pieces) if large else b"".join(pieces)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


_HEADERS = f"content-type: {wire.CONTENT_TYPE}\r\n"


class Peers:
    """HTTP client for control calls: msgpack there, msgpack back. There is no limit on connections: a reservation
    waits on its own for as long as D is full."""

    def __init__(self) -> None:
        self._pools: dict[str, HttpPool] = {}

    async def close(self) -> None:
        await asyncio.gather(*[pool.close() for pool in self._pools.values()])

    async def call(self, url: str, path: str, message: wire.Message, timeout_s: float | None = None) -> bytes:
        """POST a message and return the answer's body.

        Raises the ServeError that the peer answered with, and InstanceFailed with code ``peer_unreachable`` where
        it is gone or does not answer in ``timeout_s``.
        """
        if (pool := self._pools.get(url)) is None:
            tls = tls_files()
            pool = HttpPool(url, url, cluster_key(), tls=tls)
            self._pools[url] = pool
        try:
            async with asyncio.timeout(timeout_s):
                return await HttpCall(pool, "POST", path, _HEADERS, [wire.encode(message)]).ask()
        except (InstanceLost, TimeoutError) as error:
            reason = str(error) or f"nothing in {timeout_s:g} s"
            raise unreachable(f"{url} does not answer {path}: {reason}") from error


def unreachable(message: str) -> InstanceFailed:
    """Return an error: this instance, which is well, cannot reach another, which may be well too."""
    return InstanceFailed(message, code=PEER_UNREACHABLE)
