"""The server's end of :mod:`epd_serve.rpc.streams`: an ASGI application answers the calls, as it answers HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from epd_serve.rpc import streams
from epd_serve.rpc.link import LinkClosed, Messages, pack
from epd_serve.rpc.streams import Call, Credit, Cut, Data, End, Head, Told

logger = logging.getLogger(__name__)

Event = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
App = Callable[[Scope, Callable[[], Awaitable[Event]], Callable[[Event], Awaitable[None]]], Awaitable[None]]

#: The name of the ASGI extension that takes a piece of an answer's body at once, behind the answer's start.
WRITE = "epd.write"
#: A list of messages is sent when so much of answers is in it.
_LIST_BYTES = 1 << 20
#: Where a protocol of uvicorn keeps itself, for the request that upgrades its connection.
_CONNECTION = "upgradable"
_SWITCHING = b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: %b\r\n\r\n" % (
    streams.PROTOCOL.encode()
)


class BrokenStream(Exception):
    """An answer that has begun cannot be completed: it is to be cut off, not closed in order."""


class UpgradableHttp(HttpToolsProtocol):
    """uvicorn's protocol, whose connection a request may take over for :class:`StreamServer`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.app_state = {**self.app_state, _CONNECTION: self}
        super().connection_made(transport)

    def _unsupported_upgrade_warning(self) -> None:
        """The application decides; the connection has no other request, as nothing is parsed behind this one."""
        if self.cycle is not None:
            self.cycle.keep_alive = False

    def upgrade(self, app: App, scope: Scope) -> None:
        """Answer the request that is being served with the change to streams, whose calls ``app`` answers."""
        transport = self.transport
        self._unset_keepalive_if_required()
        self.connections.discard(self)
        self.cycle.disconnected = True  # its answer is written here
        self.cycle.message_event.set()
        upgraded = StreamServer(transport, self.loop, self.server_state, app, scope)
        transport.set_protocol(upgraded)
        transport.write(_SWITCHING)


def upgrade(scope: Scope, app: App) -> bool:
    """Whether a request for :data:`epd_serve.rpc.streams.PATH` was answered with the change of its connection; not
    where the caller speaks another version."""
    offered = [value for name, value in scope["headers"] if name == b"upgrade"]
    if offered != [streams.PROTOCOL.encode()]:
        return False
    connection: UpgradableHttp = scope["state"][_CONNECTION]
    connection.upgrade(app, scope)
    return True


class StreamServer(asyncio.Protocol):
    """One caller's connection."""

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        state: ServerState,
        app: App,
        scope: Scope,
    ) -> None:
        """``scope`` is that of the request that made the connection, and of all calls on it."""
        self._transport = transport
        self._loop = loop
        self._state = state
        self._app = app
        self._scope = {
            name: value for name, value in scope.items() if name not in ("path", "raw_path", "headers", "method")
        }
        self._messages = Messages(streams.ASKED, streams.MAX_CALL_BYTES)
        self._exchanges: dict[int, Exchange] = {}
        self._last = 0
        self._due: list[Told] = []
        self._due_bytes = 0
        self._is_stopping = False
        state.connections.add(cast(Any, self))  # uvicorn names its own protocols alone

    def shutdown(self) -> None:
        """Close the connection when the last call is answered; uvicorn waits for that, for a time."""
        self._is_stopping = True
        if not self._exchanges:
            self._transport.close()

    # Of the transport.

    def data_received(self, data: bytes) -> None:
        try:
            for asked in self._messages.take(data):
                for message in asked:
                    self._take(message)
        except LinkClosed as error:
            logger.warning("a caller's connection is closed: what it sends cannot be read: %s", error)
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._state.connections.discard(cast(Any, self))
        self._due.clear()
        for exchange in self._exchanges.values():
            exchange.left()

    def _take(self, message: streams.Asked) -> None:
        number = message.stream
        if type(message) is Call:
            if number <= self._last:
                raise LinkClosed(f"stream {number} comes behind {self._last}")
            self._last = number
            if self._is_stopping:
                self.put(Cut(number))
                return
            exchange = self._exchanges[number] = Exchange(self, message)
            task = self._loop.create_task(self._serve(exchange, message))
            self._state.tasks.add(task)
            task.add_done_callback(self._state.tasks.discard)
            return
        asked = self._exchanges.get(number)
        if asked is None:  # its answer is complete
            return
        if type(message) is Credit:
            asked.credit(message.num_bytes)
        else:
            asked.left()

    async def _serve(self, exchange: Exchange, call: Call) -> None:
        scope = {
            **self._scope,
            "method": "POST",
            "path": call.path,
            "raw_path": call.path.encode(),
            "query_string": b"",
            "headers": call.headers,
            "extensions": {WRITE: exchange.write},
        }
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except BrokenStream:
            pass
        except Exception:
            logger.exception("a call failed")
        finally:
            del self._exchanges[call.stream]
            if not exchange.is_over:
                self.put(Cut(call.stream))
            if self._is_stopping and not self._exchanges:
                self._flush()
                self._transport.close()

    def put(self, message: Told, num_bytes: int = 0) -> None:
        """Send a message with all others of this pass of the event loop."""
        if not self._due:
            self._loop.call_soon(self._flush)
        self._due.append(message)
        self._due_bytes += num_bytes
        if self._due_bytes >= _LIST_BYTES:
            self._flush()

    def _flush(self) -> None:
        due, self._due, self._due_bytes = self._due, [], 0
        if due and not self._transport.is_closing():
            self._transport.write(pack(due, max_bytes=streams.MAX_ANSWER_BYTES))


class Exchange:
    """One call: ASGI's ``receive`` and ``send`` of it.

    Attributes:
        is_over: whether the answer is complete, or the caller does not want it.
    """

    def __init__(self, server: StreamServer, call: Call) -> None:
        self.is_over = False
        self._server = server
        self._number = call.stream
        self._body: bytes | None = call.body
        self._room_bytes = streams.WINDOW_BYTES
        self._held = bytearray()  # for which the reader has no room
        self._news = asyncio.Event()  # cleared by those who wait for it

    async def receive(self) -> Event:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        while not self.is_over:
            self._news.clear()
            await self._news.wait()
        return {"type": "http.disconnect"}

    async def send(self, event: Event) -> None:
        if self.is_over:
            return
        if event["type"] == "http.response.start":
            self._server.put(Head(self._number, event["status"], list(event.get("headers", ()))))
            return
        if body := event.get("body", b""):
            self.write(body)
        while self._held and not self.is_over:
            self._news.clear()
            await self._news.wait()
        if not event.get("more_body", False) and not self.is_over:
            self.is_over = True
            self._server.put(End(self._number))
            self._news.set()

    def write(self, body: bytes) -> None:
        """Send a piece of the answer's body now, or as its reader gets room."""
        if self.is_over:
            return
        if len(body) <= self._room_bytes and not self._held:
            self._room_bytes -= len(body)
            self._server.put(Data(self._number, body), len(body))
        else:
            self._held += body
            self._send_held()

    def credit(self, num_bytes: int) -> None:
        """The reader has room for so much more."""
        self._room_bytes += num_bytes
        if self._room_bytes > streams.WINDOW_BYTES:
            raise LinkClosed(f"the reader of stream {self._number} takes more than there was")
        self._send_held()
        if not self._held:
            self._news.set()

    def left(self) -> None:
        """The caller does not want the rest."""
        self.is_over = True
        self._held.clear()
        self._news.set()

    def _send_held(self) -> None:
        piece = bytes(self._held[: self._room_bytes])
        if piece:
            del self._held[: len(piece)]
            self._room_bytes -= len(piece)
            self._server.put(Data(self._number, piece), len(piece))
