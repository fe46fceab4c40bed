"""The caller's end of a link: all calls of one caller to one server over a single connection.

Each call is a stream of its own. A connection is made for the first call; when it ends, all of its calls fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import cached_property
from typing import Any, Self, cast
from urllib.parse import urlsplit

from epd_serve.errors import (
    InstanceLost,
    InstanceUnreachable,
    InstanceUntrusted,
    ServeError,
    TooLarge,
    error_from_response,
)
from epd_serve.rpc import sockets
from epd_serve.rpc.cluster import CallerGreeting, Endpoint, Service, address_text
from epd_serve.rpc.descriptors import shortage
from epd_serve.rpc.messages import (
    CREDIT_BYTES,
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

#: Limit of an answer that is read as a whole.
MAX_BODY_BYTES = 256 * 1024**2
#: Limit of an answer that only reports a result.
MAX_NOTE_BYTES = 64 * 1024
#: Limits of TLS's handshake and of a server's proof of the cluster key.
TLS_HANDSHAKE_S, GREETING_S = 5.0, 10.0
CLOSED = "the connection was closed"
#: TLS 1.3 has no other way to say it: the client's handshake is over by then.
CERTIFICATE_NOT_ACCEPTED = "so a server ends it that does not accept the client's certificate"


class LinkCall:
    """One call and its answer. It must be closed; before the answer's end that cancels the call.

    Attributes:
        opened: done when the answer has begun, with this call as its result. It raises the server's own error
            (:func:`epd_serve.errors.error_from_response`), or InstanceLost for a connection that fails.
        headers: of the answer.
        connection: None before the call is sent, and after its end.
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
        self._news = asyncio.Event()  # cleared by the one who waits for it

    async def read(self, max_bytes: int = MAX_BODY_BYTES) -> bytes:
        """Return the whole body. Raises InstanceLost where it breaks off, or has more than ``max_bytes``."""
        body = bytearray()
        async for chunk in self:
            body += chunk
            if len(body) > max_bytes:
                self.close()
                raise InstanceLost(f"instance {self.link.name} answered with more than {max_bytes} bytes")
        return bytes(body)

    def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes, never empty pieces. Raises InstanceLost where it breaks off."""
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        while not self._pieces:
            if self._failure is not None:
                raise self._failure
            if self._complete:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._take()

    async def forward(self, write: Callable[[bytes], bool]) -> bool:
        """Hand the body to ``write`` as it comes, from the event loop's callbacks, until it returns False.

        Return whether the body is complete; where it is not, no more is handed on until the next call of this
        method. What ``write`` raises is raised here. Raises InstanceLost where the body breaks off.
        """
        if self._pieces and not write(self._take()):
            return self._complete
        if not self._complete and self._failure is None:
            self._write = write
            try:
                self._news.clear()
                await self._news.wait()
            finally:
                self._write = None
        if self._failure is not None and not self._pieces:
            raise self._failure
        return self._complete and not self._pieces

    def close(self) -> None:
        """Cancel the call unless its answer is complete. Idempotent."""
        self.closed = True
        if self.connection is not None:
            self.connection.cancel(self)
        if not self.opened.done():
            self.opened.cancel()
        elif not self.opened.cancelled():
            self.opened.exception()  # nobody has to ask for it
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

    # What follows is called by the connection.

    def receive(self, data: bytes) -> None:
        """Take a piece of the body: done for each token of each stream."""
        uncredited = self._uncredited_bytes = self._uncredited_bytes + len(data)
        if self._write is None:
            self._pieces.append(data)
            self._news.set()
            if uncredited > WINDOW_BYTES and self.connection is not None:
                self.connection.abort("it sends more than its reader has room for")
            return
        try:
            more = self._write(data)
        except Exception as error:  # noqa: BLE001 - the one who waits in forward() gets it
            self._failure, more = error, False
        if not more:
            self._write = None
            self._news.set()
        if uncredited >= CREDIT_BYTES:
            self._send_credit()

    def begin(self, headers: dict[bytes, bytes]) -> None:
        """Take the beginning of the answer."""
        self.headers = headers
        if not self.opened.done():
            self.opened.set_result(self)

    def end(self, error: Exception | None = None) -> None:
        """Take the end of the answer, or the ``error`` in place of the rest."""
        self.connection = None
        self._complete, self._failure = error is None, error
        if error is not None and not self.opened.done():
            self.opened.set_exception(error)
        self._news.set()


class Connection(asyncio.Protocol):
    """One connection of a link. ``greeted`` is done when both ends have proved the cluster's key."""

    def __init__(self, link: Link) -> None:
        self.transport: asyncio.Transport
        self._link = link
        self.closed: asyncio.Future[None] = link.loop.create_future()
        self.greeted: asyncio.Future[None] = link.loop.create_future()
        self._greeting: CallerGreeting
        self._opening = b""
        self._frames: Frames[Any] = Frames(WELCOME, MAX_GREETING_BYTES)
        self._calls: dict[int, LinkCall] = {}
        self._num_calls = 0
        self._reason = ""

    def begin(self, call: LinkCall) -> None:
        """Send a call, on a connection that is not closing."""
        self._num_calls += 1
        call.number, call.connection = self._num_calls, self
        try:
            self.transport.writelines(pack_call(call.number, call.path, call.body))
        except ValueError:
            call.end(TooLarge(f"the request has more than the {MAX_CALL_BYTES} bytes that an instance takes"))
        else:
            self._calls[call.number] = call
        call.body = ()

    def send(self, message: Credit | Cancel) -> None:
        if not self.transport.is_closing():
            self.transport.write(pack([message]))

    def cancel(self, call: LinkCall) -> None:
        """Drop the rest of a call."""
        call.connection = None
        del self._calls[call.number]
        self.send(Cancel(call.number))

    def abort(self, reason: str = "") -> None:
        """Close the connection; its calls fail with the reason."""
        self._reason = self._reason or reason
        self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by name
        link = self._link
        reached = Endpoint(link.service, address_text(*transport.get_extra_info("peername")[:2]))
        self._greeting = CallerGreeting(link.key, reached, f"instance {link.name} at {link.url}")
        self.transport.write(OPENING + pack(self._greeting.hello))

    def connection_lost(self, error: Exception | None) -> None:
        reason = self._reason or ((str(error) or type(error).__name__) if error else "")
        self.closed.set_result(None)
        if not self.greeted.done():
            if self._link.is_tls:
                reason = f"{reason or CLOSED}; {CERTIFICATE_NOT_ACCEPTED}"
            self.greeted.set_exception(LinkClosed(reason))
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.end(self._link.lost(call, reason))

    def data_received(self, data: bytes) -> None:
        try:
            if not self.greeted.done():
                data = self._greet(data)
            if data:
                self._receive(self._frames.take(data))
        except LinkClosed as error:
            self.abort(f"what it sends cannot be read: {error}")

    def _greet(self, data: bytes) -> bytes:
        """Take the server's opening and its proof, and prove the key; return what came behind them."""
        if self._opening != OPENING:
            self._opening += data
            data, self._opening = self._opening[len(OPENING) :], self._opening[: len(OPENING)]
            if not OPENING.startswith(self._opening):
                speaks = f"does not speak {PROTOCOL}: it has another version of epd-serve than its caller"
                self.greeted.set_exception(
                    InstanceUntrusted(f"instance {self._link.name} at {self._link.url} {speaks}")
                )
                self.transport.abort()
                return b""
        for answer in self._frames.take(data, 1):
            data, self._frames = self._frames.rest, Frames(TO_CALLER, MAX_ANSWER_BYTES)
            try:
                proof = self._greeting.prove(answer)
            except ServeError as error:
                self.greeted.set_exception(error)
                self.transport.abort()
                return b""
            self.transport.write(pack(proof))
            self.greeted.set_result(None)
            return data
        return b""

    def _receive(self, lists: list[list[ToCaller]]) -> None:
        """Take what came with one read. The pieces of a stream are one, so that its client is written to once."""
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
                if call is None:  # cancelled meanwhile
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
                    call.end(self._link.error(message) if message.status else self._link.lost(call, ""))
        for number, piece in pieces.items():
            if (call := calls.get(number)) is not None:
                call.receive(piece if isinstance(piece, bytes) else b"".join(piece))


class Link:
    """Calls to one server; an async context manager that breaks them off.

    Attributes:
        name: the instance's, for error messages. url: without a slash at its end.
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
        """Both ends of a connection prove the cluster's ``key``, if there is one, and the server proves to be this
        ``service`` (:mod:`epd_serve.rpc.cluster`). With https both show a certificate of the CA in ``tls``; None:
        the server one of a public CA. ``address``: the one that is meant of a host name with several.

        Raises ValueError for a URL that is not http(s).
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no URL of an instance; it should look like 'http://10.0.0.1:9000'")
        self.name = name
        self.url = url.rstrip("/")
        self.key = key
        self.service: Service = service
        self.is_tls = parts.scheme == "https"
        self._address = address or parts.hostname
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
        """The running event loop, kept: asyncio would look it up with a system call each time (CPython 3.11)."""
        return asyncio.get_running_loop()

    def send(self, call: LinkCall) -> None:
        """Send a call at once, or when there is a connection."""
        connection = self._connection
        if connection is not None and not connection.transport.is_closing():
            connection.begin(call)
            return
        self._waiting.append(call)
        if self._connecting is None:
            self._connecting = self.loop.create_task(self._connect())

    async def ask(self, path: str, body: Sequence[bytes] = (), max_bytes: int = MAX_NOTE_BYTES) -> bytes:
        """Send a call and return the whole answer. Raises as ``opened`` and ``read`` of :class:`LinkCall`."""
        call = LinkCall(self, path, body)
        try:
            self.send(call)
            await call.opened
            return await call.read(max_bytes)
        finally:
            call.close()

    def error(self, told: Error) -> ServeError:
        """Return the error that the server reports."""
        return error_from_response(told.status, told.body[:MAX_NOTE_BYTES], origin=f"instance {self.name}")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Break off all calls."""
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        if self._connection is not None:
            self._connection.abort()
            await self._connection.closed

    async def _connect(self) -> None:
        """Make a connection for the calls that wait; they fail where there is none."""
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
            failure = shortage(error) or unreachable
        except UnicodeError as error:  # the host is no name
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
        """Return the error of a call whose connection has ended."""
        if not call.opened.done():
            return InstanceLost(self._unreachable(reason))
        return InstanceLost(f"instance {self.name} broke off its answer ({reason or CLOSED})")

    def _unreachable(self, reason: str) -> str:
        return f"instance {self.name} at {self.url} is not reachable ({reason or CLOSED})"

    async def _open(self) -> Connection:
        """Return a connection that is greeted. Raises OSError, LinkClosed and ServeError."""
        _, connection = await sockets.create_connection(
            lambda: Connection(self), self._address, self._port, **self._tls_options
        )
        try:
            async with asyncio.timeout(GREETING_S):
                await connection.greeted
        except TimeoutError:
            connection.abort()
            raise LinkClosed(f"it did not greet within {GREETING_S:g} s") from None
        except BaseException:
            connection.abort()
            raise
        return connection
