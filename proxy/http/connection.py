"""A client's connection: requests for generated text are served here, everything else by uvicorn.

Generation is nearly all that a gateway does, and a general server costs more than the rest of the work on it. So a
plain ``POST`` to one of the application's endpoints (``app.state.endpoints``) is read into one buffer and answered
straight from the event loop's callbacks. A connection with anything else in front, or with a head that is not the
plainest HTTP/1.1, goes to uvicorn's protocol and comes back when another plain POST begins.
"""

from __future__ import annotations

import asyncio
import logging
import re
import resource
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec

from epd_serve.errors import ServeError, Unavailable
from epd_serve.rpc.bounded import MAX_HEADER_BYTES, HeadWatch
from proxy.http.arrival import LARGE_BYTES, LowWater, Turn, Turns, buffer
from proxy.http.client import Client, ClientLeft, Header, ResponseAborted, too_large
from proxy.http.http1 import PLAIN_HEAD, PLAIN_START, HalfClosed, ReturningHttp, arrival_limits
from proxy.settings import Current

if TYPE_CHECKING:
    from uvicorn.config import Config
    from uvicorn.server import ServerState

logger = logging.getLogger(__name__)

_HEADER = re.compile(rb"([^:]+):[ \t]*(.*?)[ \t]*\r\n")
_LENGTH = re.compile(rb"[0-9]{1,15}")
#: Headers that ask for more than is done here.
_UNUSUAL = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"trailer", b"te"})
#: Headers that must not have two values.
_ONCE = frozenset({b"content-length", b"connection", b"host", b"authorization", b"origin"})

#: A closed connection whose client takes nothing for so long is not waited for.
_LINGER_S = 30.0

#: A process that has opened more than this part of the files that it may open takes no more connections: what is
#: left is for its own, to instances and others.
_PART_OPEN = 0.75
#: How long the client of one too many may take to send something, so that it can be answered.
_REFUSED_S = 1.0
_FULL = Unavailable("too many connections at once; try again later", code="out_of_descriptors").to_json()
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(_FULL), _FULL)
)

#: What is not a body is received here and taken out at once; all connections share it.
_scratch = bytearray(64 * 1024)
_scratch_view = memoryview(_scratch)


#: Headers of an answer that pages of other sites may read.
SHOWN_HEADERS = ("x-request-id", "retry-after")


class Cors:
    """``origins`` as browsers send them ("https://chat.example.com"), or "*" for any; none: nothing is allowed."""

    def __init__(self, origins: tuple[str, ...] = ()) -> None:
        self._origins = frozenset(origin.encode() for origin in origins)

    def allows(self, origin: bytes) -> bool:
        """Whether pages of that origin may send requests."""
        return b"*" in self._origins or origin in self._origins

    def headers(self, request: Mapping[bytes, bytes]) -> list[Header]:
        """Return headers of an answer on the server's short way; the request's come with names in lower case."""
        origin = request.get(b"origin")
        if origin is None or not self._origins:
            return []
        shown = (b"access-control-expose-headers", ", ".join(SHOWN_HEADERS).encode())
        if b"*" in self._origins:
            return [(b"access-control-allow-origin", b"*"), shown]
        vary = (b"vary", b"Origin")
        return [(b"access-control-allow-origin", origin), shown, vary] if origin in self._origins else [vary]


#: Requests that begin in one pass of the event loop.
_STARTS_PER_PASS = 4


class Starts:
    """Has requests of one event loop begin a few in each of its passes.

    To parse and route one takes a fraction of a millisecond. Of hundreds that come at once, the tokens of all
    other requests would wait for the last.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._room = _STARTS_PER_PASS  # since it was full last, in this pass or before

    def begin(self, loop: asyncio.AbstractEventLoop, start: Callable[[], None]) -> None:
        """Call ``start``, now or in a later pass."""
        if not self._room:
            self._waiting.append(start)
            return
        self._room -= 1
        if not self._room:
            loop.call_soon(self._next_pass, loop)
        start()

    def _next_pass(self, loop: asyncio.AbstractEventLoop) -> None:
        waiting, self._room = self._waiting, _STARTS_PER_PASS
        while waiting and self._room:
            self._room -= 1
            waiting.popleft()()
        if not self._room:
            loop.call_soon(self._next_pass, loop)


class GatewayConnection(asyncio.BufferedProtocol):
    """uvicorn's ``http=`` protocol class of the gateway."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._config = config
        self._state = server_state
        self._app_state = app_state
        self._loop = _loop or asyncio.get_event_loop()
        state = getattr(config.app, "state", None)
        self._endpoints = getattr(state, "endpoints", {})
        self._turns: Turns = getattr(state, "turns", None) or Turns()
        self._starts: Starts = getattr(state, "starts", None) or Starts()
        self._cors: Cors = getattr(state, "cors", None) or Cors()
        self._guard: Guard | None = getattr(state, "guard", None)
        self._transport: asyncio.Transport
        #: Of the other end, without its port; "" where there is none.
        self._address: str
        self._uvicorn: ReturningHttp | None = None
        #: Received and not yet looked at: a head, or what comes behind the request in progress.
        self._pending = bytearray()
        self._client: RawClient | None = None
        self._active_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._reading_paused = False
        #: The client does not read what it has got; its next request waits until it does.
        self._writing_paused = False
        self._stopping = False
        self._is_refused = False
        #: The client has sent its last.
        self._is_half_closed = False
        self._arrival = arrival_limits(config.app)
        self._head = HeadWatch(self._loop, self._arrival.header_s, self._close)

    # Of uvicorn's server.

    def shutdown(self) -> None:
        """Close the connection, after the request in progress if there is one."""
        self._stopping = True
        if self._client is None:
            self._close()
        else:
            self._client.keep_alive = False

    # Of the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by name
        if _is_one_too_many(transport):
            self._is_refused = True
            self._timer = self._loop.call_later(_REFUSED_S, self._transport.abort)
            return
        name = transport.get_extra_info("peername")
        self._address = name[0] if isinstance(name, tuple) else ""
        self._low_water = LowWater(transport)
        self._state.connections.add(cast(Any, self))
        self._head.begin()

    def connection_lost(self, error: Exception | None) -> None:
        self._state.connections.discard(cast(Any, self))
        self._head.stop()
        if self._timer is not None:
            self._timer.cancel()
        if self._client is not None:
            self._client.lost()

    def get_buffer(self, sizehint: int) -> memoryview:
        return _scratch_view if self._client is None else self._client.buffer() or _scratch_view

    def buffer_updated(self, nbytes: int) -> None:
        if self._is_refused:
            if not self._transport.is_closing():
                self._transport.write(_REFUSAL)
                self._transport.close()
            return
        taken, client = 0, self._client
        if client is not None and client.unread_bytes:
            self._low_water.expect(client.unread_bytes - nbytes)
            taken = client.received(nbytes)
        if taken == nbytes:
            return
        self._pending += _scratch_view[taken:nbytes]
        if self._client is None and not self._writing_paused:
            self._begin()
        elif len(self._pending) > MAX_HEADER_BYTES:  # requests sent ahead have to wait for their turn
            self._reading_paused = True
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        """A client that has sent all of its request, and no more to come, gets its answer."""
        client = self._client
        if client is None or client.unread_bytes or client.is_complete or client.has_begun or self._is_refused:
            return False
        self._is_half_closed = True
        HalfClosed(self._loop, self._transport, lambda: client.has_begun or client is not self._client)
        return True

    def pause_writing(self) -> None:
        self._writing_paused = True
        if self._client is not None:
            self._client.pause()

    def resume_writing(self) -> None:
        self._writing_paused = False
        if self._client is not None:
            self._client.resume()
        elif not self._transport.is_closing():
            self._next()

    # Requests.

    def _begin(self) -> None:
        """Serve the request at the start of what is pending, if it is there."""
        pending = self._pending
        head = PLAIN_HEAD.match(pending)
        if head is None:
            if (
                not PLAIN_START.startswith(pending[: len(PLAIN_START)])
                or b"\r\n\r\n" in pending
                or len(pending) > MAX_HEADER_BYTES
            ):
                self._hand_over()
            elif self._head.since_s is None:
                self._head.begin()
            return
        lines = _HEADER.findall(head[2])
        headers = {name.lower(): value for name, value in reversed(lines)}  # of several values, the first
        is_doubtful = not _UNUSUAL.isdisjoint(headers)
        if len(headers) < len(lines):
            names = [name.lower() for name, _ in lines]
            is_doubtful = is_doubtful or any(names.count(name) > 1 for name in _ONCE)
        length = headers.get(b"content-length")
        connection = headers.get(b"connection", b"keep-alive").lower()
        endpoint: RawEndpoint | None = self._endpoints.get(head[1])
        if (
            endpoint is None
            or length is None
            or b"host" not in headers
            or _LENGTH.fullmatch(length) is None
            or connection not in (b"keep-alive", b"close")
            or is_doubtful
            or (self._guard is not None and self._guard.problem(b"POST", head[1], headers) is not None)
        ):
            self._hand_over()
            return
        size, end = int(length), head.end()
        del head
        begin = memoryview(pending)[end : end + size]
        unread_bytes = size - len(begin)
        is_kept = size <= endpoint.settings.now.gateway.max_body_bytes
        client = self._client = RawClient(
            transport=self._transport,
            loop=self._loop,
            address=self._address,
            size=size,
            begin=begin,
            unread_bytes=unread_bytes,
            kept=bytearray(b"" if unread_bytes else begin) if is_kept else None,
            keep_alive=connection == b"keep-alive" and not self._stopping,
            default_headers=self._state.default_headers,
        )
        if b"origin" in headers:
            client.default_headers = [*client.default_headers, *self._cors.headers(headers)]
        self._pending = pending[end + size :]
        if unread_bytes:
            self._low_water.expect(unread_bytes)
            if is_kept and unread_bytes >= LARGE_BYTES:
                client.take_turn(self._turns)
        self._head.since_s = None
        self._state.total_requests += 1
        self._starts.begin(self._loop, partial(self._serve, client, endpoint, headers))

    def _serve(self, client: RawClient, endpoint: RawEndpoint, headers: Mapping[bytes, bytes]) -> None:
        task = self._loop.create_task(endpoint.serve(client, headers))
        self._state.tasks.add(task)
        task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[None]) -> None:
        """Whatever went wrong, ``is_complete`` says what became of the answer."""
        self._state.tasks.discard(task)
        client, self._client = self._client, None
        assert client is not None
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, ResponseAborted):
            logger.error("a request failed", exc_info=error)
            if not client.has_begun:
                problem = ServeError(f"an error inside the gateway: {type(error).__name__}").to_json()
                client.keep_alive = False  # the client must not send its next request here
                client.respond_now(500, [(b"content-type", b"application/json")], problem)
        client.kept = client.on_left = None
        if client.turn is not None:
            client.let_go()
        if self._transport.is_closing():
            return
        if not client.is_complete or not client.keep_alive:
            self._close()
            return
        if client.unread_bytes:
            # The rest of a body that was refused is read and forgotten, as the next request comes behind it.
            self._client = client
            client.on_skipped = self._next
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_later(self._arrival.time_for_body(client.unread_bytes), self._close)
            return
        self._next()

    def _next(self) -> None:
        if self._client is not None:
            self._client = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        if self._stopping or (self._is_half_closed and not self._pending):
            self._close()
            return
        self._active_s = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._config.timeout_keep_alive, self._close_if_idle)
        if self._writing_paused:
            return
        if self._reading_paused:
            self._reading_paused = False
            self._transport.resume_reading()
        if self._pending:
            self._begin()

    def _close(self, unsent_before: int = 0) -> None:
        """Close the connection once its client has all that was written, or has stopped to take it."""
        self._transport.close()
        unsent = self._transport.get_write_buffer_size()
        if unsent and unsent == unsent_before:
            self._transport.abort()
        elif unsent:
            self._loop.call_later(_LINGER_S, self._close, unsent)

    def _close_if_idle(self) -> None:
        self._timer = None
        left_s = self._active_s + self._config.timeout_keep_alive - self._loop.time()
        if self._client is not None:
            return  # the next timer starts behind the request
        if left_s <= 0:
            self._close()
        else:
            self._timer = self._loop.call_later(left_s, self._close_if_idle)

    # uvicorn.

    def _hand_over(self) -> None:
        if self._uvicorn is None:
            self._uvicorn = ReturningHttp(self._config, self._state, self._app_state, self._loop)
            self._uvicorn.give_back = self.take_back
        self._head.stop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        data, self._pending = bytes(self._pending), bytearray()
        self._state.connections.discard(cast(Any, self))
        self._transport.set_protocol(self._uvicorn)
        self._uvicorn.take_over(self._transport)
        self._uvicorn.feed(data)

    def take_back(self, data: bytes) -> None:
        """A plain POST begins on a connection that uvicorn had."""
        self._state.connections.add(cast(Any, self))
        self._transport.set_protocol(self)
        self._pending += data
        self._begin()


def _is_one_too_many(transport: asyncio.BaseTransport) -> bool:
    """A new descriptor is the lowest that is free, so its number says how many are not."""
    own = transport.get_extra_info("socket")
    return own is not None and own.fileno() >= _PART_OPEN * resource.getrlimit(resource.RLIMIT_NOFILE)[0]


_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_LAST_CHUNK = b"0\r\n\r\n"
_CHUNKED = (b"transfer-encoding", b"chunked")


class Guard(Protocol):
    """Says why a request is refused, which uvicorn's way answers."""

    def problem(self, method: bytes, path: bytes, headers: Mapping[bytes, bytes]) -> ServeError | None: ...


class RawEndpoint(Protocol):
    """The endpoint that serves a request."""

    settings: Current

    async def serve(self, client: Client, headers: Mapping[bytes, bytes]) -> None: ...


class RawClient(msgspec.Struct, eq=False, kw_only=True):
    """:class:`proxy.http.client.Client` over a transport.

    Attributes:
        size: length of the body.
        begin: what had come of it with the head, until it is part of ``kept``.
        kept: the body; empty until more of it can be read than its beginning. None: it is not kept.
        keep_alive: whether the connection goes on after the answer.
        has_begun, is_complete: whether something of the answer is out, and all of it.
        on_skipped: called when a body that nobody wants has been read to its end.
    """

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    address: str
    size: int
    begin: memoryview
    unread_bytes: int
    kept: bytearray | None
    keep_alive: bool
    default_headers: Sequence[Header]
    has_begun: bool = False
    is_complete: bool = False
    turn: Turn | None = None
    on_skipped: Callable[[], None] | None = None
    on_left: Callable[[], None] | None = None
    _body_waiter: asyncio.Future[None] | None = None
    _is_lost: bool = False
    _head: bytes = b""
    _can_write: bool = True
    _writable: asyncio.Event | None = None

    # Of the connection.

    def take_turn(self, turns: Turns) -> None:
        """Read the body, which is kept, when it is its turn."""
        turn = self.turn = turns.ask(self.loop, self.size, self.transport.resume_reading)
        if not turn.has_begun:
            self.transport.pause_reading()

    def buffer(self) -> memoryview | None:
        """Return the place of the body's next bytes; None: they are not kept."""
        if self.kept is None or not self.unread_bytes:
            return None
        if not self.kept:
            self.kept = buffer(self.size)
            self.kept[: len(self.begin)] = self.begin
            self.begin = memoryview(b"")
        return memoryview(self.kept)[self.size - self.unread_bytes :]

    def received(self, nbytes: int) -> int:
        """Take bytes that have come; return how many of them belong to the body."""
        taken = min(nbytes, self.unread_bytes)
        self.unread_bytes -= taken
        if not self.unread_bytes:
            if self._body_waiter is not None and not self._body_waiter.done():
                self._body_waiter.set_result(None)
            if self.on_skipped is not None:
                self.on_skipped()
        return taken

    def lost(self) -> None:
        self._is_lost = True
        if self._body_waiter is not None and not self._body_waiter.done():
            self._body_waiter.set_result(None)
        if self.on_left is not None and not self.is_complete:
            self.on_left()
        self.resume()

    def pause(self) -> None:
        self._can_write = False
        self._writable = asyncio.Event()

    def resume(self) -> None:
        self._can_write = True
        if self._writable is not None:
            self._writable.set()

    def respond_now(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        """The whole answer in one piece."""
        self.has_begun = self.is_complete = True
        self.start(headers, status=status, framing=(b"content-length", b"%d" % len(body)))
        if not self.transport.is_closing():
            self.transport.write(self._head + body)

    # Of proxy.http.client.Client.

    async def body(self, max_bytes: int) -> bytearray:
        if self.kept is None:
            raise too_large(max_bytes)
        if self.unread_bytes and not self._is_lost:
            self._body_waiter = self.loop.create_future()
            await self._body_waiter
        if self._is_lost:
            raise ClientLeft
        body, self.kept = self.kept, None
        return body

    def let_go(self) -> None:
        turn, self.turn = self.turn, None
        if turn is not None:
            if not turn.has_begun:  # it was refused unread
                self.transport.resume_reading()
            turn.end()

    async def respond(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        if status == HTTPStatus.REQUEST_TIMEOUT:
            self.keep_alive = False  # nobody knows when the rest of the body comes
        self.respond_now(status, headers, body)

    def start(self, headers: Sequence[Header], *, status: int = 200, framing: Header = _CHUNKED) -> None:
        lines = [b"%b: %b\r\n" % header for header in (*self.default_headers, *headers, framing)]
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        self._head = b"%b%b\r\n" % (_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status, b"".join(lines))

    def write(self, data: bytes | memoryview, *, last: bool = False) -> bool:
        out = b"%x\r\n%b\r\n" % (len(data), bytes(data)) if data else b""
        if last:
            out += _LAST_CHUNK
            self.is_complete = True
        if self._head:
            out, self._head = self._head + out, b""
            self.has_begun = True
        if not self.transport.is_closing():
            self.transport.write(out)
        return self._can_write

    async def drain(self) -> None:
        if self.is_complete:
            return  # the connection waits for its reader, the request need not
        if not self._can_write and self._writable is not None and not self.transport.is_closing():
            await self._writable.wait()
