"""The caller's end of a link: all calls of one caller to one server over a single connection.

The first call opens the connection; when the connection ends, all of its calls fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import cached_property
from typing import Any, Self, cast

from epd_serve.errors import (
    InstanceLost,
    InstanceUnreachable,
    InstanceUntrusted,
    ServeError,
    TooLarge,
    error_from_response,
)
from epd_serve.protocol.addresses import server_of
from epd_serve.rpc import sockets
from epd_serve.rpc.cluster import CallerGreeting, Endpoint, Service, address_text
from epd_serve.rpc.messages import (
    CREDIT_BYTES,
    LENGTH,
    MAX_ANSWER_BYTES,
    MAX_CALL_BYTES,
    MAX_GREETING_BYTES,
    OPENING,
    PROTOCOL,
    TO_CALLER,
    WELCOME,
    WINDOW_BYTES,
    Cancel,
    Credit,
    Data,
    End,
    Error,
    Frames,
    Head,
    LinkClosed,
    ToCaller,
    pack,
    pack_call,
)
from epd_serve.rpc.tls import TlsFiles

#: Limit of an answer read whole.
MAX_BODY_BYTES = 256 * 1024**2
#: Limit of an answer that only reports a result.
MAX_NOTE_BYTES = 64 * 1024
#: Limits of the TLS handshake and of the greeting.
TLS_HANDSHAKE_S, GREETING_S = 5.0, 10.0
CLOSED = "the connection was closed"
#: In TLS 1.3 the server rejects a certificate after the client's handshake, by closing the connection.
CERTIFICATE_NOT_ACCEPTED = "perhaps the server does not accept the client's certificate"


class LinkCall:
    """One call and its answer. It must be closed, which cancels an unfinished call.

    Attributes:
        opened: set to this call when the answer begins. Raises the server's error
            (:func:`epd_serve.errors.error_from_response`), or InstanceLost if the connection fails.
        headers: the answer's headers.
        connection: None before the call is sent and after its end.
    """

    def __init__(self, link: Link, path: str, body: Sequence[bytes]) -> None:
        self.link = link
        self.path = path
        self.body = body
        self.number = 0
        self.opened: asyncio.Future[Any] = link.loop.create_future()
        self.headers: dict[bytes, bytes] = {}
        self.connection: Connection | None = None
        self.closed = False
        self._complete = False
        self._failure: Exception | None = None
        self._pieces: list[bytes] = []
        self._uncredited_bytes = 0
        self._write: Callable[[bytes], bool] | None = None
        self._changed = asyncio.Event()  # cleared by the waiter

    async def read(self, max_bytes: int = MAX_BODY_BYTES) -> bytes:
        """Return the whole body. Raises InstanceLost if it breaks off or exceeds ``max_bytes``."""
        body = bytearray()
        async for chunk in self.chunks():
            body += chunk
            if len(body) > max_bytes:
                self.close()
                raise InstanceLost(f"instance {self.link.name} answered with more than {max_bytes} bytes")
        return bytes(body)

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield non-empty pieces of the body. Raises InstanceLost if it breaks off."""
        while True:
            if self._pieces:
                yield self._take()
            elif self._failure is not None:
                raise self._failure
            elif self._complete:
                return
            else:
                self._changed.clear()
                await self._changed.wait()

    async def forward(self, write: Callable[[bytes], bool]) -> bool:
        """Pass the body to ``write`` as it arrives, in callbacks of the event loop, until it returns False.

        Return whether the body is complete; if not, call again to continue. Raises the exceptions of ``write``,
        and InstanceLost if the body breaks off.
        """
        if self._pieces and not write(self._take()):
            return self._complete
        if not self._complete and self._failure is None:
            self._write = write
            try:
                self._changed.clear()
                await self._changed.wait()
            finally:
                self._write = None
        if self._failure is not None and not self._pieces:
            raise self._failure
        return self._complete and not self._pieces

    def close(self) -> None:
        """Cancel the call unless its answer is complete. Idempotent."""
        if self.closed:
            return
        self.closed = True
        if self.connection is not None:
            self.connection.cancel(self)
        if not self.opened.done():
            self.opened.cancel()
        elif not self.opened.cancelled() and self.opened.exception() is None:
            self.opened = self.link.loop.create_future()  # its result is this call: a reference cycle
            self.opened.cancel()
        self._pieces.clear()

    def _take(self) -> bytes:
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        if self._uncredited_bytes >= CREDIT_BYTES:
            self._send_credit()
        return data

    def _send_credit(self) -> None:
        if self.connection is not None:
            self.connection.send(Credit(self.number, self._uncredited_bytes))
        self._uncredited_bytes = 0

    # ------------------------------------------------------------------ called by the connection

    def receive(self, data: bytes) -> None:
        """Accept a piece of the body. Runs for every token of a stream."""
        uncredited = self._uncredited_bytes = self._uncredited_bytes + len(data)
        if self._write is None:
            self._pieces.append(data)
            self._changed.set()
            if uncredited > WINDOW_BYTES and self.connection is not None:
                self.connection.abort("the server exceeded the reader's window")
            return
        try:
            more = self._write(data)
        except Exception as error:  # noqa: BLE001 - raised by forward()
            self._failure, more = error, False
        if not more:
            self._write = None
            self._changed.set()
        if uncredited >= CREDIT_BYTES:
            self._send_credit()

    def begin(self, headers: dict[bytes, bytes]) -> None:
        """Begin the answer."""
        self.headers = headers
        if not self.opened.done():
            self.opened.set_result(self)

    def end(self, error: Exception | None = None) -> None:
        """End the answer, with an ``error`` if it is incomplete."""
        self.connection = None
        self._complete, self._failure = error is None, error
        if error is not None and not self.opened.done():
            self.opened.set_exception(error)
        self._changed.set()


class Connection(asyncio.Protocol):
    """One connection of a link, after the greeting."""

    def __init__(self, link: Link) -> None:
        self.transport: asyncio.Transport
        self._link = link
        self.closed: asyncio.Future[None] = link.loop.create_future()
        self._frames = Frames(TO_CALLER, MAX_ANSWER_BYTES)
        self._calls: dict[int, LinkCall] = {}
        self._num_calls = 0
        self._reason = ""

    def begin(self, call: LinkCall) -> None:
        """Send a call; the connection must not be closing."""
        self._num_calls += 1
        call.number, call.connection = self._num_calls, self
        try:
            self.transport.writelines(pack_call(call.number, call.path, call.body))
        except ValueError:
            call.end(TooLarge(f"the request exceeds the {MAX_CALL_BYTES} bytes that an instance accepts"))
        else:
            self._calls[call.number] = call
        call.body = ()

    def send(self, message: Credit | Cancel) -> None:
        if not self.transport.is_closing():
            self.transport.write(pack([message]))

    def cancel(self, call: LinkCall) -> None:
        call.connection = None
        del self._calls[call.number]
        self.send(Cancel(call.number))

    def abort(self, reason: str = "") -> None:
        """Close the connection; its calls fail with the reason."""
        self._reason = self._reason or reason
        self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass

    def connection_lost(self, error: Exception | None) -> None:
        reason = self._reason or ((str(error) or type(error).__name__) if error else "")
        self.closed.set_result(None)
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.end(self._link.lost(call, reason))

    def data_received(self, data: bytes) -> None:
        try:
            self._receive(self._frames.take(data))
        except LinkClosed as error:
            self.abort(f"the server's message cannot be read: {error}")

    def _receive(self, lists: list[list[ToCaller]]) -> None:
        """Handle the messages of one read; pieces of a stream are joined, so its client gets one write."""
        calls = self._calls
        pieces: dict[int, bytes | list[bytes]] = {}
        for messages in lists:
            for message in messages:
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
                if call is None:  # cancelled
                    continue
                if (piece := pieces.pop(number, None)) is not None:
                    call.receive(piece if isinstance(piece, bytes) else b"".join(piece))
                if type(message) is Head:
                    call.begin(dict(message.headers))
                    continue
                calls.pop(number, None)
                if type(message) is End:
                    call.end()
                else:
                    assert isinstance(message, Error)
                    if message.status:
                        origin = f"instance {self._link.name}"
                        call.end(error_from_response(message.status, message.body[:MAX_NOTE_BYTES], origin=origin))
                    else:
                        call.end(self._link.lost(call, ""))
        for number, piece in pieces.items():
            if (call := calls.get(number)) is not None:
                call.receive(piece if isinstance(piece, bytes) else b"".join(piece))


class Link:
    """Calls to one server, as an async context manager that closes the connection.

    Args:
        name: the instance's name, for error messages.
        key: the cluster key that both ends prove; None for no proof.
        service: the service that the server must prove to be (:mod:`epd_serve.rpc.cluster`).
        tls: the certificates for https; None expects a server with a certificate of a public CA.
        address: the host name's address to call.

    Raises ValueError unless the URL is http(s).
    """

    def __init__(
        self,
        name: str,
        url: str,
        key: str | None = None,
        service: Service = "instance",
        *,
        tls: TlsFiles | None = None,
        address: str | None = None,
    ) -> None:
        parts = server_of(url)
        self.name = name
        self.url = url.rstrip("/")
        self.key = key
        self.service: Service = service
        self.is_tls = parts.scheme == "https"
        self._address = address or parts.hostname or ""
        self._port = parts.port or (443 if self.is_tls else 80)
        self._tls_options: dict[str, Any] = {}
        if self.is_tls:
            self._tls_options = {
                "ssl": tls.client_context() if tls is not None else True,
                "server_hostname": parts.hostname,
                "ssl_handshake_timeout": TLS_HANDSHAKE_S,
            }
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._waiting: list[LinkCall] = []

    @cached_property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop, cached: CPython 3.11 looks it up with a system call."""
        return asyncio.get_running_loop()

    def send(self, call: LinkCall) -> None:
        """Send a call, now or once connected."""
        connection = self._connection
        if connection is not None and not connection.transport.is_closing():
            connection.begin(call)
            return
        self._waiting.append(call)
        if self._connecting is None:
            self._connecting = self.loop.create_task(self._connect())

    async def ask(self, path: str, body: Sequence[bytes] = (), max_bytes: int = MAX_NOTE_BYTES) -> bytes:
        """Send a call and return the whole answer. Raises as :class:`LinkCall` does."""
        call = LinkCall(self, path, body)
        try:
            self.send(call)
            await call.opened
            return await call.read(max_bytes)
        finally:
            call.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        if self._connection is not None:
            self._connection.abort()
            await self._connection.closed

    async def _connect(self) -> None:
        """Connect and send the waiting calls, or fail them."""
        failure: Exception | None = None
        try:
            self._connection = await self._open()
        except ServeError as error:
            failure = error
        except LinkClosed as error:
            failure = InstanceLost(self._unreachable(str(error)))
        except OSError as error:
            is_refused = isinstance(error, ConnectionRefusedError)
            unreachable = InstanceUnreachable(self._unreachable(str(error)), is_refused=is_refused)
            failure = sockets.shortage_error(error) or unreachable
        except UnicodeError as error:  # an invalid host name
            failure = InstanceUnreachable(self._unreachable(str(error)))
        finally:
            self._connecting = None
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            if call.closed:
                continue
            if failure is not None:
                call.end(failure)
            elif self._connection is None or self._connection.transport.is_closing():
                call.end(self.lost(call, ""))
            else:
                self._connection.begin(call)

    def lost(self, call: LinkCall, reason: str) -> InstanceLost:
        """Return the error of a call whose connection has closed."""
        if not call.opened.done():
            return InstanceLost(self._unreachable(reason))
        return InstanceLost(f"instance {self.name} broke off its answer ({reason or CLOSED})")

    def _unreachable(self, reason: str) -> str:
        return f"instance {self.name} at {self.url} is not reachable ({reason or CLOSED})"

    async def _open(self) -> Connection:
        """Connect, and prove the cluster key at both ends. Raises OSError, LinkClosed and ServeError."""
        reader = asyncio.StreamReader()
        transport, _ = await sockets.create_connection(
            lambda: asyncio.StreamReaderProtocol(reader), self._address, self._port, **self._tls_options
        )
        try:
            async with asyncio.timeout(GREETING_S):
                await self._greet(reader, transport)
            if transport.is_closing():
                raise LinkClosed(CLOSED)
        except BaseException as error:
            transport.abort()
            if isinstance(error, TimeoutError):
                silent = self._unreachable(f"the server did not greet within {GREETING_S:g} s")
                raise InstanceUnreachable(silent) from None
            if isinstance(error, OSError | EOFError):
                reason = CLOSED if isinstance(error, EOFError) else str(error)
                raise LinkClosed(f"{reason}; {CERTIFICATE_NOT_ACCEPTED}" if self.is_tls else reason) from error
            raise
        connection = Connection(self)
        transport.set_protocol(connection)
        connection.connection_made(transport)
        return connection

    async def _greet(self, reader: asyncio.StreamReader, transport: asyncio.Transport) -> None:
        if (peer := transport.get_extra_info("peername")) is None:  # the connection was reset as it was made
            raise LinkClosed(CLOSED)
        reached = Endpoint(self.service, address_text(*peer[:2]))
        greeting = CallerGreeting(self.key, reached, f"instance {self.name} at {self.url}")
        transport.write(OPENING + pack(greeting.hello))
        opening = b""
        while opening != OPENING:
            opening += await reader.readexactly(1)
            if not OPENING.startswith(opening):
                other = f"does not speak {PROTOCOL}: it runs another version of epd-serve"
                raise InstanceUntrusted(f"instance {self.name} at {self.url} {other}")
        num_bytes: int = LENGTH.unpack(await reader.readexactly(LENGTH.size))[0]
        if num_bytes > MAX_GREETING_BYTES:
            raise LinkClosed(f"a greeting of {num_bytes} bytes")
        try:
            answer = WELCOME.decode(await reader.readexactly(num_bytes))
        except ValueError as error:  # also invalid UTF-8
            raise LinkClosed(f"invalid greeting: {error}") from error
        transport.write(pack(greeting.prove(answer)))
