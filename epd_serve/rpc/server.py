"""The server's end of links, on a port that also answers HTTP; a connection's first byte selects the protocol."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, cast

import uvicorn
from uvicorn import Config
from uvicorn.server import ServerState

from epd_serve.errors import InvalidRequest, ServeError
from epd_serve.rpc import bounded
from epd_serve.rpc.cluster import Endpoint, Refused, ServerGreeting, Service, address_text
from epd_serve.rpc.messages import (
    HELLO,
    MAX_ANSWER_BYTES,
    MAX_CALL_BYTES,
    MAX_GREETING_BYTES,
    OPENING,
    PROOF,
    TO_SERVER,
    WINDOW_BYTES,
    Call,
    Credit,
    Data,
    End,
    Error,
    Frames,
    Head,
    Hello,
    LinkClosed,
    ToCaller,
    pack,
)
from epd_serve.rpc.tls import TlsFiles

logger = logging.getLogger(__name__)

Header = tuple[bytes, bytes]
JSON = (b"content-type", b"application/json")
#: Size at which a list of messages is sent at once.
_LIST_BYTES = 1 << 20


class BrokenStream(Exception):
    """A streamed answer fails after its head."""


class NoSuchCall(InvalidRequest):
    status = 404


class Pieces:
    """A streamed answer, with one writer and one reader."""

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._write: Callable[[bytes], None] | None = None
        self._changed = asyncio.Event()  # cleared by the waiter
        self._is_over = False
        self._error: Exception | None = None
        self.has_begun = False

    def put(self, piece: bytes) -> None:
        """Add a non-empty piece; ignored after the end."""
        self.has_begun = True
        if self._write is not None:
            self._write(piece)
        elif not self._is_over:
            self._held.append(piece)
            self._changed.set()

    def end(self, error: Exception | None = None) -> None:
        """End the answer, with ``error`` after the pieces so far. Only the first end counts."""
        if not self._is_over:
            self._is_over, self._error, self._write = True, error, None
            self._changed.set()

    async def wait(self) -> None:
        """Return when a piece or the end is there. Raises the error of an answer without pieces."""
        while not self._held and not self._is_over:
            self._changed.clear()
            await self._changed.wait()
        if not self._held and self._error is not None:
            raise self._error

    async def forward(self, write: Callable[[bytes], None]) -> None:
        """Pass each piece to ``write`` as it arrives. Raises the error at the end."""
        held, self._held = self._held, []
        for piece in held:
            write(piece)
        if not self._is_over:
            self._write = write
            try:
                self._changed.clear()
                await self._changed.wait()
            finally:
                self._write = None
        if self._error is not None:
            raise self._error

    async def read(self) -> bytes:
        """Return the whole answer. Raises the error at its end."""
        pieces: list[bytes] = []
        await self.forward(pieces.append)
        return b"".join(pieces)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """An answer: an optional stream, then the body. ``on_close`` is called once, when it is sent or cancelled."""

    headers: tuple[Header, ...] = ()
    body: bytes = b""
    stream: AsyncGenerator[bytes, None] | Pieces | None = None
    on_close: Callable[[], None] | None = None


Handler = Callable[[bytes], Awaitable[Reply]]


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkService:
    """The calls that a port answers.

    Attributes:
        calls: path → handler of the body.
        key: the cluster key that both ends prove; None for no proof.
        service: service that the server proves to be.
        own_address: returns the address (``host:port``) that callers may use besides the socket's.
        http: uvicorn's protocol for other connections.
    """

    calls: Mapping[str, Handler]
    key: str | None = None
    service: Service = "instance"
    own_address: Callable[[], str] = lambda: ""
    http: type[bounded.BoundedHttp] = bounded.BoundedHttp

    @property
    def protocol(self) -> Any:
        """The ``http`` of a ``uvicorn.Config``."""
        return partial(Port, self)


class Port(asyncio.Protocol):
    """A connection before its first bytes. uvicorn creates it like its own protocols."""

    def __init__(
        self, service: LinkService, config: Config, server_state: ServerState, app_state: dict[str, Any], **_: Any
    ) -> None:
        self._service = service
        self._state = server_state
        self._http = partial(service.http, config, server_state, app_state)
        self._begun = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self._state.connections.add(cast(Any, self))  # uvicorn types its own protocols only
        self._timer = asyncio.get_running_loop().call_later(bounded.HEADER_S, transport.close)

    def connection_lost(self, error: Exception | None) -> None:
        self.shutdown()
        self._state.connections.discard(cast(Any, self))

    def shutdown(self) -> None:
        self._timer.cancel()
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._begun += data
        if OPENING.startswith(self._begun) and self._begun != OPENING:
            return
        self._timer.cancel()
        self._state.connections.discard(cast(Any, self))
        is_link = self._begun.startswith(OPENING)
        if not is_link and self._begun.startswith(OPENING[:1]):  # of another version
            self._transport.write(OPENING)
            self._transport.close()
            return
        made = LinkServer(self._service, self._state) if is_link else self._http()
        self._transport.set_protocol(made)
        made.connection_made(self._transport)
        made.data_received(self._begun[len(OPENING) :] if is_link else self._begun)


class LinkServer(asyncio.Protocol):
    """One caller's link."""

    def __init__(self, service: LinkService, state: ServerState) -> None:
        self._service = service
        self._state = state
        self._loop = asyncio.get_running_loop()
        self._greeting_frames: Frames[Any] | None = Frames(HELLO, MAX_GREETING_BYTES)
        self._frames = Frames(TO_SERVER, MAX_CALL_BYTES)
        self._answers: dict[int, _Answer] = {}
        self._last = 0
        self._due: list[ToCaller] = []
        self._due_bytes = 0
        self._is_stopping = False

    def shutdown(self) -> None:
        """Close the connection after the last answer, for which uvicorn waits for a time."""
        self._is_stopping = True
        if not self._answers:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._state.connections.add(cast(Any, self))
        self._timer = self._loop.call_later(bounded.HEADER_S, transport.close)
        service = self._service
        addresses = (address_text(*transport.get_extra_info("sockname")[:2]), service.own_address())
        self._greeting = ServerGreeting(service.key, [Endpoint(service.service, one) for one in addresses])

    def connection_lost(self, error: Exception | None) -> None:
        self._timer.cancel()
        self._state.connections.discard(cast(Any, self))
        self._due.clear()
        for answer in self._answers.values():
            answer.task.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            while self._greeting_frames is not None:
                if not (greeting := self._greeting_frames.take(data, 1)):
                    return
                data = self._greeting_frames.rest
                self._greet(greeting[0])
            if data:
                for message in chain.from_iterable(self._frames.take(data)):
                    if type(message) is Call:
                        self._begin(message)
                    elif (answer := self._answers.get(message.stream)) is None:  # complete
                        continue
                    elif type(message) is Credit:
                        answer.credit(message.num_bytes)
                    else:
                        answer.task.cancel()
        except Refused as error:
            logger.warning("refused a caller: %s", error)
            self._transport.write(OPENING + pack(error.message))
            self._transport.close()
        except LinkClosed as error:
            logger.warning("closed a caller's link: %s", error)
            self._transport.abort()

    def _greet(self, message: Any) -> None:
        """Answer the caller's hello, then check its proof. Raises Refused."""
        if isinstance(message, Hello):
            self._greeting_frames = Frames(PROOF, MAX_GREETING_BYTES)
            self._transport.write(OPENING + pack(self._greeting.answer(message)))
        else:
            self._greeting.check(message)
            self._greeting_frames = None
            self._timer.cancel()

    def _begin(self, call: Call) -> None:
        number = call.stream
        if number <= self._last:
            raise LinkClosed(f"stream {number} follows stream {self._last}")
        self._last = number
        if self._is_stopping:
            self.put(Error(number))
            return
        answer = self._answers[number] = _Answer(self, number)
        answer.task = self._loop.create_task(answer.give(self._service.calls.get(call.path), call))
        self._state.tasks.add(answer.task)
        answer.task.add_done_callback(partial(self._end, number))

    def _end(self, number: int, task: asyncio.Task[None]) -> None:
        self._state.tasks.discard(task)
        del self._answers.pop(number).task  # the frames of its traceback refer to the answer: a reference cycle
        if self._is_stopping and not self._answers:
            self._flush()
            self._transport.close()

    def put(self, message: ToCaller, num_bytes: int = 0) -> None:
        """Send a message together with the others of this pass of the event loop."""
        if not self._due:
            self._loop.call_soon(self._flush)
        self._due.append(message)
        self._due_bytes += num_bytes
        if self._due_bytes >= _LIST_BYTES:
            self._flush()

    def _flush(self) -> None:
        due, self._due, self._due_bytes = self._due, [], 0
        if due and not self._transport.is_closing():
            self._transport.write(pack(due, MAX_ANSWER_BYTES))


class _Answer:
    """The answer to one call, sent by ``task``."""

    task: asyncio.Task[None]

    def __init__(self, server: LinkServer, number: int) -> None:
        self._server = server
        self._number = number
        self._room_bytes = WINDOW_BYTES
        self._held = bytearray()  # waits for credit
        self._drained = asyncio.Event()  # cleared by the waiter

    async def give(self, handler: Handler | None, call: Call) -> None:
        """Send the handler's reply or its error."""
        try:
            if handler is None:
                raise NoSuchCall(f"no such call: {call.path}")
            reply = await handler(cast(bytes, call.body))
        except ServeError as error:
            self._server.put(Error(self._number, error.status, error.to_json()))
            return
        except ValueError as error:  # msgspec's names the wrong field
            self._server.put(Error(self._number, 400, InvalidRequest(str(error)).to_json()))
            return
        except Exception:
            logger.exception("a call failed")
            failure = ServeError("the instance failed; see its log")
            self._server.put(Error(self._number, failure.status, failure.to_json()))
            return
        try:
            self._server.put(Head(self._number, list(reply.headers)))
            if isinstance(reply.stream, Pieces):
                await reply.stream.forward(self.write)
            elif reply.stream is not None:
                async with aclosing(reply.stream) as pieces:
                    async for piece in pieces:
                        self.write(piece)
                        await self._drain()
            if reply.body:
                self.write(reply.body)
            await self._drain()
            self._server.put(End(self._number))
        except BrokenStream:
            await self._drain()
            self._server.put(Error(self._number))
        except Exception:
            logger.exception("an answer broke off")
            self._server.put(Error(self._number))
        finally:
            if reply.on_close is not None:
                reply.on_close()

    def write(self, body: bytes) -> None:
        """Send a piece of the body now, or as the reader sends credit."""
        if len(body) <= self._room_bytes and not self._held:
            self._room_bytes -= len(body)
            self._server.put(Data(self._number, body), len(body))
        else:
            self._held += body
            self._send_held()

    def credit(self, num_bytes: int) -> None:
        self._room_bytes += num_bytes
        if self._room_bytes > WINDOW_BYTES:
            raise LinkClosed(f"the reader of stream {self._number} credits more than it was sent")
        self._send_held()
        if not self._held:
            self._drained.set()

    async def _drain(self) -> None:
        while self._held:
            self._drained.clear()
            await self._drained.wait()

    def _send_held(self) -> None:
        piece = bytes(self._held[: self._room_bytes])
        if piece:
            del self._held[: len(piece)]
            self._room_bytes -= len(piece)
            self._server.put(Data(self._number, piece), len(piece))


class AdminHttp(bounded.BoundedHttp):
    """The protocol of admin APIs, whose bodies are JSON."""

    max_body_bytes = 4 << 20


@asynccontextmanager
async def serve_app(
    app: object, listener: socket.socket, http: Any = AdminHttp, tls: TlsFiles | None = None
) -> AsyncIterator[None]:
    """Serve ``app`` within the context on a listening socket, which is closed at the end.

    With ``tls``, callers must show a certificate.
    """
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=http,
        ws="none",
        lifespan="off",
        access_log=False,
        log_level="warning",
        server_header=False,
        **({} if tls is None else tls.server_options),
    )
    server = QuietServer(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = server.force_exit = True
        await task


class QuietServer(uvicorn.Server):
    """uvicorn without its signal handling."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
