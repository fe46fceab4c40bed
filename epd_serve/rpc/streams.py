"""All calls of one caller to one server over a single connection, each with a stream of its own.

The connection begins as HTTP/1.1 and changes by ``GET /streams`` with ``upgrade: epd-streams/1``, which proves the
cluster's key as any request does (:mod:`epd_serve.rpc.cluster`). From there on both ends send lists of messages
(:mod:`epd_serve.rpc.link`); a server puts all that is due in one pass of its event loop, such as the tokens of one
step for all streams, into one list::

    caller → server   Call, Credit, Cancel
    server → caller   Head, then Data as the answer comes, and End; or Cut where it cannot be completed

Each stream may have ``WINDOW_BYTES`` on their way that its reader has not taken: a slow reader stops its own
stream alone. A connection that ends, ends all of its streams. At the server an ASGI application answers the calls,
as it answers HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from itertools import chain
from typing import Any, cast

import msgspec

from epd_serve.errors import InstanceUntrusted, ServeError, TooLarge, error_from_response
from epd_serve.rpc.bounded import BoundedHttp
from epd_serve.rpc.http import MAX_UNREAD_BYTES, HttpCall, HttpPool, RemoteCall
from epd_serve.rpc.link import LinkClosed, Messages, pack

logger = logging.getLogger(__name__)

PATH = "/streams"
PROTOCOL = "epd-streams/1"
#: What may be on its way of one stream without its reader's word.
WINDOW_BYTES = MAX_UNREAD_BYTES
#: A reader gives its word after so much: few messages, and the stream does not stand still meanwhile.
CREDIT_BYTES = WINDOW_BYTES // 2
#: Of one list to a server: a call has a whole prompt; and to a caller, where answers come in pieces.
MAX_CALL_BYTES, MAX_ANSWER_BYTES = 1 << 28, 1 << 23
#: A connection without a call is closed after this time.
IDLE_S = 30.0


class Message(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of what travels; ``stream`` is the caller's number of a call, never used twice."""

    stream: int


class Call(Message, frozen=True, tag=0):
    """A POST. ``headers`` have their names in lower case."""

    path: str
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Credit(Message, frozen=True, tag=1):
    """The reader has taken so much of a stream; as much more may come."""

    num_bytes: int


class Cancel(Message, frozen=True, tag=2):
    """The caller does not want the rest of an answer."""


class Head(Message, frozen=True, tag=0):
    """Status and headers of an answer, their names in lower case."""

    status: int
    headers: list[tuple[bytes, bytes]]


class Data(Message, frozen=True, tag=1):
    """A piece of an answer's body."""

    data: bytes


class End(Message, frozen=True, tag=2):
    """The answer is complete."""


class Cut(Message, frozen=True, tag=3):
    """The rest of the answer will not come."""


Asked = Call | Credit | Cancel
Told = Head | Data | End | Cut
_ASKED = msgspec.msgpack.Decoder(list[Asked])
_TOLD = msgspec.msgpack.Decoder(list[Told])


class StreamCall(RemoteCall):
    """A call over :class:`Streams`.

    Attributes:
        request: until it is sent.
    """

    connection: StreamsConnection | None

    def __init__(self, streams: Streams, path: str, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        super().__init__(streams.pool)
        self.request: Call | None = Call(0, path, headers, body)
        self.number = 0
        self._uncredited_bytes = 0

    def receive(self, data: bytes) -> None:
        uncredited = self._uncredited_bytes = self._uncredited_bytes + len(data)
        write = self._write
        if write is None or uncredited >= CREDIT_BYTES:
            self._lacks_room = uncredited >= CREDIT_BYTES
            super().receive(data)
            if self._lacks_room and not self._pieces:
                self._go_on()
            return
        # As in the base, without another call: this is done for each token of each stream.
        try:
            if write(data):
                return
        except Exception as error:  # noqa: BLE001 - the one who waits in forward() gets it
            self._failure = error
        self._write = None
        self._news.set()

    def _break_off(self) -> None:
        if self.connection is not None:
            self.connection.cancel(self)
            self.connection = None

    def _hold_back(self) -> None:
        if self.connection is not None:
            self.connection.abort("it sends more than its reader has room for")

    def _go_on(self) -> None:
        if self.connection is not None:
            self.connection.send(Credit(self.number, self._uncredited_bytes))
        self._uncredited_bytes, self._lacks_room = 0, False


class StreamsConnection(asyncio.Protocol):
    """The caller's end of a connection."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self.closed: asyncio.Future[None] = loop.create_future()
        self.transport = transport
        self._loop = loop
        self._messages = Messages(_TOLD, MAX_ANSWER_BYTES)
        self._calls: dict[int, StreamCall] = {}
        self._num_calls = self._num_before = 0
        self._reason = ""
        self._look = loop.call_later(IDLE_S, self._close_if_idle)

    def begin(self, call: StreamCall) -> None:
        """Send a call, on a connection that is not closing."""
        self._num_calls += 1
        request, call.request = call.request, None
        assert request is not None
        call.number, call.connection = self._num_calls, self
        self._calls[call.number] = call
        try:
            packed = pack([msgspec.structs.replace(request, stream=call.number)], max_bytes=MAX_CALL_BYTES)
        except ValueError:
            del self._calls[call.number]
            call.fail(TooLarge(f"the request has more than the {MAX_CALL_BYTES} bytes that an instance takes"))
        else:
            self.transport.write(packed)

    def send(self, message: Asked) -> None:
        if not self.transport.is_closing():
            self.transport.write(pack([message], max_bytes=MAX_CALL_BYTES))

    def cancel(self, call: StreamCall) -> None:
        """What comes of the call from here on is not wanted."""
        del self._calls[call.number]
        self.send(Cancel(call.number))

    def abort(self, reason: str = "") -> None:
        """Close the connection; its calls fail with the reason."""
        self._reason = self._reason or reason
        self.transport.abort()

    # Of the transport.

    def connection_lost(self, error: Exception | None) -> None:
        reason = self._reason or ((str(error) or type(error).__name__) if error else "")
        self._look.cancel()
        self.closed.set_result(None)
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.fail(call.lost(reason))

    def data_received(self, data: bytes) -> None:
        """Take what came with one read. The pieces of a stream are one, so that its client is written to once."""
        try:
            lists = self._messages.take(data)
        except LinkClosed as error:
            self.abort(f"what it sends cannot be read: {error}")
            return
        calls = self._calls
        pieces: dict[int, bytes | list[bytes]] = {}
        for told in lists:
            for message in told:
                number = message.stream
                if type(message) is Data:
                    if number not in pieces:
                        pieces[number] = message.data
                    elif isinstance(known := pieces[number], list):
                        known.append(message.data)
                    else:
                        pieces[number] = [known, message.data]
                    continue
                call = calls.get(number)
                if call is None:  # cancelled meanwhile
                    continue
                if (piece := pieces.pop(number, None)) is not None:
                    call.receive(piece if isinstance(piece, bytes) else b"".join(piece))
                if type(message) is Head:
                    call.begin(message.status, dict(message.headers))
                    continue
                del calls[number]
                if type(message) is End:
                    call.end()
                else:
                    call.fail(call.lost(""))
        for number, piece in pieces.items():
            if (call := calls.get(number)) is not None:
                call.receive(piece if isinstance(piece, bytes) else b"".join(piece))

    def _close_if_idle(self) -> None:
        """Close the connection where there was no call since the last look."""
        if not self._calls and self._num_calls == self._num_before:
            self.transport.close()
            return
        self._num_before = self._num_calls
        self._look = self._loop.call_later(IDLE_S, self._close_if_idle)


class _Upgrade(HttpCall):
    """A call by which a connection of its own changes from HTTP to streams (RFC 9110, section 7.8).

    ``opened`` gives the :class:`StreamsConnection`, which has the connection from there on. A server that answers
    in HTTP speaks another version: InstanceUntrusted.
    """

    keeps_connection = False

    def __init__(self, pool: HttpPool) -> None:
        headers = f"connection: upgrade\r\nupgrade: {PROTOCOL}\r\n"
        super().__init__(pool, "GET", PATH, headers, on_new_connection=True)

    def begin(self, status: int, headers: dict[bytes, bytes]) -> None:
        super().begin(max(status, 400), headers)

    def error(self, body: bytes) -> Exception:
        told = error_from_response(self.status, body, origin=f"instance {self._pool.name}")
        if self.status in (401, 403, 503):
            return told
        return InstanceUntrusted(
            f"instance {self._pool.name} at {self._pool.url} does not speak {PROTOCOL}: it has another "
            f"version of epd-serve than its caller ({told.message})"
        )

    def upgraded(self, transport: asyncio.Transport, rest: bytes) -> None:
        self.connection = None
        if self.opened.done():
            transport.abort()
            return
        made = StreamsConnection(transport, self._pool.loop)
        transport.set_protocol(made)
        self.opened.set_result(made)
        if rest:
            made.data_received(rest)


class Streams:
    """One caller's calls to one server: a connection that is made when there is a call for it."""

    def __init__(self, pool: HttpPool) -> None:
        self.pool = pool
        self._connection: StreamsConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._waiting: list[StreamCall] = []

    def send(self, call: StreamCall) -> None:
        """Send a call at once, or when there is a connection."""
        connection = self._connection
        if connection is not None and not connection.transport.is_closing():
            connection.begin(call)
            return
        self._waiting.append(call)
        if self._connecting is None:
            self._connecting = self.pool.loop.create_task(self._connect())

    async def close(self) -> None:
        """Break off all calls."""
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        if self._connection is not None:
            self._connection.abort()
            await self._connection.closed

    async def _connect(self) -> None:
        upgrade = _Upgrade(self.pool)
        failure: ServeError | None = None
        try:
            upgrade.send()
            self._connection = await upgrade.opened
        except ServeError as error:
            failure = error
        finally:
            upgrade.close()
            self._connecting = None
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            if call.closed:
                continue
            if failure is not None:
                call.fail(failure)
            elif self._connection is None or self._connection.transport.is_closing():
                call.fail(call.lost(""))
            else:
                self._connection.begin(call)


# The server's end.

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
    PROTOCOL.encode()
)


class BrokenStream(Exception):
    """An answer that has begun cannot be completed: it is to be cut off, not closed in order."""


class UpgradableHttp(BoundedHttp):
    """uvicorn's protocol, whose connection a request may take over for :class:`StreamServer`."""

    max_body_bytes = MAX_CALL_BYTES

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.app_state = {**self.app_state, _CONNECTION: self}
        super().connection_made(transport)

    def _unsupported_upgrade_warning(self) -> None:
        """The application decides; the connection has no other request, as nothing is parsed behind this one."""
        if self.cycle is not None:
            self.cycle.keep_alive = False


def upgrade(scope: Scope, app: App) -> bool:
    """Answer a request for :data:`PATH` with the change of its connection to streams, whose calls ``app`` answers.

    Returns False, without an answer, where the caller speaks another version.
    """
    if [value for name, value in scope["headers"] if name == b"upgrade"] != [PROTOCOL.encode()]:
        return False
    http: UpgradableHttp = scope["state"][_CONNECTION]
    http._unset_keepalive_if_required()
    http.connections.discard(http)
    http.cycle.disconnected = True  # its answer is written here
    http.cycle.message_event.set()
    http.transport.set_protocol(StreamServer(http, app, scope))
    http.transport.write(_SWITCHING)
    return True


class StreamServer(asyncio.Protocol):
    """One caller's connection."""

    def __init__(self, http: UpgradableHttp, app: App, scope: Scope) -> None:
        """``scope`` is that of the request that made the connection, and of all calls on it."""
        self._transport: asyncio.Transport = http.transport
        self._loop, self._state, self._app = http.loop, http.server_state, app
        self._scope = {
            name: value for name, value in scope.items() if name not in ("path", "raw_path", "headers", "method")
        }
        self._messages = Messages(_ASKED, MAX_CALL_BYTES)
        self._exchanges: dict[int, Exchange] = {}
        self._last = 0
        self._due: list[Told] = []
        self._due_bytes = 0
        self._is_stopping = False
        self._state.connections.add(cast(Any, self))  # uvicorn names its own protocols alone

    def shutdown(self) -> None:
        """Close the connection when the last call is answered; uvicorn waits for that, for a time."""
        self._is_stopping = True
        if not self._exchanges:
            self._transport.close()

    # Of the transport.

    def data_received(self, data: bytes) -> None:
        try:
            for message in chain.from_iterable(self._messages.take(data)):
                number = message.stream
                if type(message) is Call:
                    if number <= self._last:
                        raise LinkClosed(f"stream {number} comes behind {self._last}")
                    self._last = number
                    if self._is_stopping:
                        self.put(Cut(number))
                        continue
                    exchange = self._exchanges[number] = Exchange(self, message)
                    task = self._loop.create_task(self._serve(exchange, message))
                    self._state.tasks.add(task)
                    task.add_done_callback(self._state.tasks.discard)
                elif (asked := self._exchanges.get(number)) is None:  # its answer is complete
                    continue
                elif type(message) is Credit:
                    asked.credit(message.num_bytes)
                else:
                    asked.left()
        except LinkClosed as error:
            logger.warning("a caller's connection is closed: what it sends cannot be read: %s", error)
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._state.connections.discard(cast(Any, self))
        self._due.clear()
        for exchange in self._exchanges.values():
            exchange.left()

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
            self._transport.write(pack(due, max_bytes=MAX_ANSWER_BYTES))


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
        self._room_bytes = WINDOW_BYTES
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
        if self._room_bytes > WINDOW_BYTES:
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
