"""All calls of one caller to one server over a single connection, each with a stream of its own.

The connection begins as HTTP/1.1 and changes by ``GET /streams`` with ``upgrade: epd-streams/1``, which proves the
cluster's key as any request does (:mod:`epd_serve.rpc.cluster`). From there on both ends send lists of messages
(:mod:`epd_serve.rpc.link`); a server puts all that is due in one pass of its event loop, such as the tokens of one
step for all streams, into one list::

    caller → server   Call, Credit, Cancel
    server → caller   Head, then Data as the answer comes, and End; or Cut where it cannot be completed

Each stream may have ``WINDOW_BYTES`` on their way that its reader has not taken: a slow reader stops its own
stream alone. A connection that ends, ends all of its streams.
"""

from __future__ import annotations

import asyncio

import msgspec

from epd_serve.errors import ServeError, TooLarge
from epd_serve.rpc.call import MAX_UNREAD_BYTES, RemoteCall
from epd_serve.rpc.http import HttpPool, Upgrade
from epd_serve.rpc.link import LinkClosed, Messages, pack

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
ASKED = msgspec.msgpack.Decoder(list[Asked])
_TOLD = msgspec.msgpack.Decoder(list[Told])


class StreamCall(RemoteCall):
    """A call over :class:`Streams`.

    Attributes:
        request: until it is sent.
    """

    connection: StreamsConnection | None

    def __init__(self, streams: Streams, path: str, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        super().__init__(streams)
        self.request: Call | None = Call(0, path, headers, body)
        self.number = 0
        self._uncredited_bytes = 0

    def receive(self, data: bytes) -> None:
        uncredited = self._uncredited_bytes = self._uncredited_bytes + len(data)
        write = self._write
        if write is None or uncredited >= CREDIT_BYTES:
            super().receive(data)
            if uncredited >= CREDIT_BYTES and not self._pieces:
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
        if self._uncredited_bytes > WINDOW_BYTES and self.connection is not None:
            self.connection.abort("it sends more than its reader has room for")

    def _go_on(self) -> None:
        if self._uncredited_bytes >= CREDIT_BYTES and self.connection is not None:
            self.connection.send(Credit(self.number, self._uncredited_bytes))
            self._uncredited_bytes = 0


class StreamsConnection(asyncio.Protocol):
    """The caller's end of a connection."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self.closed: asyncio.Future[None] = loop.create_future()
        self._transport = transport
        self._loop = loop
        self._messages = Messages(_TOLD, MAX_ANSWER_BYTES)
        self._calls: dict[int, StreamCall] = {}
        self._num_calls = self._num_before = 0
        self._reason = ""
        self._look = loop.call_later(IDLE_S, self._close_if_idle)

    @property
    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def begin(self, call: StreamCall) -> None:
        """Send a call."""
        self._num_calls += 1
        request, call.request = call.request, None
        assert request is not None
        call.number, call.connection = self._num_calls, self
        self._calls[call.number] = call
        try:
            self.send(msgspec.structs.replace(request, stream=call.number))
        except ValueError:
            del self._calls[call.number]
            call.fail(TooLarge(f"the request has more than the {MAX_CALL_BYTES} bytes that an instance takes"))

    def send(self, message: Asked) -> None:
        if not self._transport.is_closing():
            self._transport.write(pack([message], max_bytes=MAX_CALL_BYTES))

    def cancel(self, call: StreamCall) -> None:
        """What comes of the call from here on is not wanted."""
        del self._calls[call.number]
        self.send(Cancel(call.number))

    def abort(self, reason: str = "") -> None:
        """Close the connection; its calls fail with the reason."""
        self._reason = self._reason or reason
        self._transport.abort()

    # Of the transport.

    def data_received(self, data: bytes) -> None:
        try:
            self._take(self._messages.take(data))
        except LinkClosed as error:
            self.abort(f"what it sends cannot be read: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        reason = self._reason or ((str(error) or type(error).__name__) if error else "")
        self._look.cancel()
        self.closed.set_result(None)
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.fail(call.lost(reason))

    def _take(self, lists: list[list[Told]]) -> None:
        """Take what came with one read. The pieces of a stream are one, so that its client is written to once."""
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
                if (data := pieces.pop(number, None)) is not None:
                    call.receive(data if isinstance(data, bytes) else b"".join(data))
                if type(message) is Head:
                    call.begin(message.status, dict(message.headers))
                    continue
                del calls[number]
                if type(message) is End:
                    call.end()
                else:
                    call.fail(call.lost(""))
        for number, data in pieces.items():
            if (call := calls.get(number)) is not None:
                call.receive(data if isinstance(data, bytes) else b"".join(data))

    def _close_if_idle(self) -> None:
        """Close the connection where there was no call since the last look."""
        if not self._calls and self._num_calls == self._num_before:
            self._transport.close()
            return
        self._num_before = self._num_calls
        self._look = self._loop.call_later(IDLE_S, self._close_if_idle)


class Streams:
    """One caller's calls to one server: a connection that is made when there is a call for it."""

    def __init__(self, pool: HttpPool) -> None:
        self.name, self.url = pool.name, pool.url
        self._pool = pool
        self._connection: StreamsConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._waiting: list[StreamCall] = []

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._pool.loop

    def send(self, call: StreamCall) -> None:
        """Send a call at once, or when there is a connection."""
        connection = self._connection
        if connection is not None and not connection.is_closing:
            connection.begin(call)
            return
        self._waiting.append(call)
        if self._connecting is None:
            self._connecting = self.loop.create_task(self._connect())

    async def close(self) -> None:
        """Break off all calls."""
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        if self._connection is not None:
            self._connection.abort()
            await self._connection.closed

    async def _connect(self) -> None:
        upgrade = Upgrade(self._pool, PATH, PROTOCOL, lambda made: StreamsConnection(made, self.loop))
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
            elif self._connection is None or self._connection.is_closing:
                call.fail(call.lost(""))
            else:
                self._connection.begin(call)
