"""Calls to a server: over HTTP/1.1 with kept-alive connections, for calls by the thousand per second.

A call costs no task: its request is written at once where a connection is idle, and what comes back is handed on
from the event loop's own callbacks. :class:`RemoteCall` is what calls over :mod:`epd_serve.rpc.streams` are, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Self, cast
from urllib.parse import urlsplit

import httptools

from epd_serve.errors import InstanceLost, InstanceUnreachable, InstanceUntrusted, ServeError, error_from_response
from epd_serve.rpc import sockets
from epd_serve.rpc.bounded import MAX_HEADER_BYTES
from epd_serve.rpc.cluster import HELLO, Endpoint, Greeting, NotProved, Service, address_text
from epd_serve.rpc.descriptors import shortage
from epd_serve.rpc.tls import TlsFiles

#: An answer that nobody reads yet is held up to here; then the instance has to wait.
MAX_UNREAD_BYTES = 256 * 1024
#: Of an answer that is read as a whole, unless its reader knows better.
MAX_BODY_BYTES = 256 * 1024**2
#: Of one that says no more than how something went, errors among them.
MAX_NOTE_BYTES = 64 * 1024


class RemoteCall:
    """One request and its answer. It must be closed; before the answer's end that breaks the call off.

    Attributes:
        connection: as long as it has the call and there is more to come; None before and after.
        opened: done when the answer's head is there. An answer with status 400 or above is an error, which is set
            here once its body is complete (:func:`epd_serve.errors.error_from_response`); a connection that fails
            is InstanceLost.
    """

    def __init__(self, pool: HttpPool) -> None:
        self._pool = pool
        self.connection: Any = None
        self.opened: asyncio.Future[Any] = pool.loop.create_future()
        self.status = 0
        self._headers: dict[bytes, bytes] = {}
        self.closed = False
        self._complete = False
        self._failure: Exception | None = None
        self._pieces: list[bytes] = []
        self._unread_bytes = 0
        #: Whether the instance is to hear when what has come is taken: it waits for that, or soon will.
        self._lacks_room = False
        self._write: Callable[[bytes], bool] | None = None
        self._news = asyncio.Event()  # cleared by the one who waits for it

    async def read(self, max_bytes: int = MAX_BODY_BYTES) -> bytes:
        """The whole body. Raises InstanceLost where it breaks off, or has more than ``max_bytes``."""
        pieces, num_bytes = [], 0
        while num_bytes <= max_bytes:
            if self._pieces:
                pieces.append(self._take())
                num_bytes += len(pieces[-1])
            if self._complete:
                break
            if self._failure is not None:
                raise self._failure
            if self._lacks_room:
                self._go_on()
            self._news.clear()
            await self._news.wait()
        if num_bytes > max_bytes:
            self.close()
            raise InstanceLost(f"instance {self._pool.name} answered with more than {max_bytes} bytes")
        return b"".join(pieces)

    def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes, never empty pieces. Raises InstanceLost where it breaks off."""
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        """The next of :meth:`chunks`."""
        while not self._pieces and not self._complete:
            if self._failure is not None:
                raise self._failure
            self._news.clear()
            await self._news.wait()
        chunk = self._take()
        if not chunk:
            raise StopAsyncIteration
        if self._lacks_room:
            self._go_on()
        return chunk

    async def forward(self, write: Callable[[bytes], bool]) -> bool:
        """Hand the body to ``write`` as it comes, from the event loop's callbacks, until it returns False.

        Returns whether the body is complete; where it is not, no more is handed on until the next call of this
        method. What ``write`` raises is raised here. Raises InstanceLost where the body breaks off.
        """
        if self._pieces and not write(self._take()):
            return self._complete
        if not self._complete and self._failure is None:
            self._write = write
            if self._lacks_room:
                self._go_on()
            try:
                self._news.clear()
                await self._news.wait()
            finally:
                self._write = None
        if self._failure is not None and not self._pieces:
            raise self._failure
        return self._complete and not self._pieces

    def close(self) -> None:
        """Break the call off unless its answer is complete, which tells the instance."""
        self.closed = True
        if not self._complete:
            self._break_off()
        if not self.opened.done():
            self.opened.cancel()
        elif not self.opened.cancelled():
            self.opened.exception()  # nobody has to ask for it
        self._pieces.clear()

    def lost(self, reason: str) -> InstanceLost:
        reason = reason or "the connection was closed"
        if self.status:
            return InstanceLost(f"instance {self._pool.name} broke off its answer ({reason})")
        return InstanceLost(f"instance {self._pool.name} at {self._pool.url} is not reachable ({reason})")

    @cached_property
    def headers(self) -> dict[bytes, bytes]:
        """Return the answer's headers, names in lower case."""
        return {name.lower(): value for name, value in self._headers.items()}

    # What follows is called by the connection.

    def begin(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.status = status
        self._headers = headers
        if status < 400 and not self.opened.done():
            self.opened.set_result(self)

    def receive(self, data: bytes) -> None:
        """Take a piece of the body."""
        if self._write is not None:
            try:
                more = self._write(data)
            except Exception as error:  # noqa: BLE001 - the one who waits in forward() gets it
                more = False
                self._failure = error
            if not more:
                self._write = None
                self._news.set()
            return
        self._unread_bytes += len(data)
        self._pieces.append(data)
        if self.status >= 400 and self._unread_bytes > MAX_NOTE_BYTES and not self.opened.done():
            self.opened.set_exception(self.error(self._take()[:MAX_NOTE_BYTES]))
            self.close()
            return
        self._news.set()
        if self._unread_bytes > MAX_UNREAD_BYTES:
            self._hold_back()

    def end(self) -> None:
        self.connection = None
        self._complete = True
        if self.status >= 400 and not self.opened.done():
            self.opened.set_exception(self.error(self._take()))
        self._news.set()

    def error(self, body: bytes) -> Exception:
        """The error that an answer with status 400 or above stands for."""
        return error_from_response(self.status, body, origin=f"instance {self._pool.name}")

    def fail(self, error: Exception) -> None:
        self.connection = None
        if self._complete or self.closed:
            return
        self._failure = error
        if not self.opened.done():
            self.opened.set_exception(error)
        self._news.set()

    # What a connection of each kind does in its own way.

    def _break_off(self) -> None:
        """Tell the instance that the rest of the answer is not wanted."""
        raise NotImplementedError

    def _hold_back(self) -> None:
        """More is unread than may be: the instance has to wait."""
        raise NotImplementedError

    def _go_on(self) -> None:
        """All that had come was taken, and the instance had no room: it may go on."""
        raise NotImplementedError

    def _take(self) -> bytes:
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._unread_bytes = 0
        return data


class HttpCall(RemoteCall):
    """A call over HTTP. After :meth:`send`, :meth:`close` must be called; before the answer's end it breaks the
    call off, by closing the connection.

    Args:
        headers: lines that end with CR LF.

    Attributes:
        on_new_connection: whether a kept-alive one will not do, which may be to a host that is gone since.
        keeps_connection: whether the connection is for another call when the answer is complete.
    """

    keeps_connection = True
    connection: Connection | None
    _pool: HttpPool

    def __init__(
        self,
        pool: HttpPool,
        method: str,
        path: str,
        headers: str = "",
        body: Sequence[bytes] = (),
        *,
        on_new_connection: bool = False,
    ) -> None:
        super().__init__(pool)
        self.on_new_connection = on_new_connection
        size = sum(map(len, body))
        head = f"{method} {pool.prefix}{path} HTTP/1.1\r\n{pool.headers}{headers}content-length: {size}\r\n\r\n"
        self.request = [head.encode("latin-1"), *body]
        self.connecting: asyncio.Task[None] | None = None

    def send(self) -> None:
        """Send it on an idle connection, or on a new one where none is idle or the call asks for that."""
        connection = None if self.on_new_connection else self._pool.take_idle()
        if connection is not None:
            connection.begin(self)
        else:
            self._pool.connect(self)

    async def ask(self, max_bytes: int = MAX_BODY_BYTES) -> bytes:
        """Send the call, read the whole body and close the call. Raises as ``opened`` and :meth:`read`."""
        try:
            self.send()
            await self.opened
            return await self.read(max_bytes)
        finally:
            self.close()

    # What follows is called by the pool and the connection.

    def unreachable(self, error: OSError) -> None:
        """No connection could be made."""
        is_refused = isinstance(error, ConnectionRefusedError)
        lost = InstanceUnreachable(self.lost(str(error)).message, is_refused=is_refused)
        self.fail(shortage(error) or lost)

    def cut(self, reason: str, *, is_http: bool = True) -> None:
        """The connection has ended before the answer did; ``reason`` is "" where the server has closed it."""
        if self._pool.is_tls and not self.status:
            reason = f"{reason or 'the connection was closed'}; {_CERTIFICATE_NOT_ACCEPTED}"
        self.fail(self.lost(reason if is_http else f"no HTTP answer: {reason}"))

    def upgraded(self, transport: asyncio.Transport, rest: bytes) -> None:
        """The server has changed to another protocol, of which ``rest`` has come already."""
        transport.abort()
        self.cut("it changes to a protocol that was not asked for", is_http=False)

    def _break_off(self) -> None:
        if self.connecting is not None and not self.connecting.done():
            self.connecting.cancel()
        if self.connection is not None:
            self.connection.transport.abort()
            self.connection = None

    def _hold_back(self) -> None:
        if self.connection is not None and not self._lacks_room and not self.connection.transport.is_closing():
            self._lacks_room = True
            self.connection.transport.pause_reading()

    def _go_on(self) -> None:
        self._lacks_room = False
        if self.connection is not None and not self.connection.transport.is_closing():
            self.connection.transport.resume_reading()


class Connection(asyncio.Protocol):
    """Parses answers; one call at a time."""

    def __init__(self, pool: HttpPool) -> None:
        self._pool = pool
        self.transport: asyncio.Transport
        self.idle_since_s = 0.0
        self._call: HttpCall | None = None
        self._headers: dict[bytes, bytes] = {}
        self._pieces: list[bytes] = []
        self._head_bytes = 0
        self._begun = self._ended = self._reusable = False
        #: The line by which the first request proves the cluster's key; b"" where there is none to prove.
        self.proof = b""
        self.is_greeting = False
        # A namespace of their own, where the parser finds them without a frame of Python for each piece.
        self._parser = httptools.HttpResponseParser(
            SimpleNamespace(
                on_header=self._headers.__setitem__,
                on_headers_complete=self._on_headers_complete,
                on_body=self._pieces.append,
                on_message_complete=self._on_message_complete,
            )
        )

    def begin(self, call: HttpCall) -> None:
        self._call = call
        call.connection = self
        self._head_bytes = 0
        self._begun = self._ended = False
        request, call.request = call.request, []
        if self.proof:
            request[0] = request[0].removesuffix(b"\r\n") + self.proof + b"\r\n"
            self.proof = b""
        self.transport.writelines(request)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by name

    def data_received(self, data: bytes) -> None:
        call = self._call
        if call is None:  # nobody has asked: the server wants to end the connection, or is not in its senses
            self.transport.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._call = None
            self.transport.abort()
            call.cut(str(error), is_http=False)
            return
        except httptools.HttpParserUpgrade as agreed:
            self._call = None
            self._pool.lost(self)
            call.upgraded(self.transport, data[agreed.args[0] :])
            return
        if pieces := self._pieces:
            self._head_bytes = 0
            piece = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            call.receive(piece)
        elif not self._ended:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEADER_BYTES:
                self._call = None
                self.transport.abort()
                call.cut(f"its answer has more than {MAX_HEADER_BYTES} bytes of headers")
                return
        if self._ended and self._call is call:
            self._call = None
            # An answer before its request was out leaves the rest of the request on the connection.
            reusable = self._reusable and call.keeps_connection
            if reusable and not self.transport.get_write_buffer_size():
                if not (self.transport.is_reading() or self.transport.is_closing()):
                    self.transport.resume_reading()  # the call had no room
                self._pool.put_back(self)
            else:
                self.transport.abort()
            call.end()

    def connection_lost(self, error: Exception | None) -> None:
        self._pool.lost(self)
        call, self._call = self._call, None
        if call is not None:
            call.cut((str(error) or type(error).__name__) if error else "")

    def _on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        headers = self._headers.copy()
        self._headers.clear()
        if status >= 200 and self._call is not None:
            self._begun = True
            self._call.begin(status, headers)

    def _on_message_complete(self) -> None:
        if self._begun:
            self._ended = True
            self._reusable = self._parser.should_keep_alive()


TLS_HANDSHAKE_S = 5.0
#: TLS 1.3 has no other way to say it: the client's handshake is over by then.
_CERTIFICATE_NOT_ACCEPTED = "so a server ends it that does not accept the client's certificate"
#: Below the keep-alive time of most servers (5 s), so that a call never meets a connection that is just being
#: closed.
KEEP_ALIVE_S = 3.0
#: How long a server may take to prove that it has the cluster's key.
GREETING_S = 10.0


class HttpPool:
    """The connections to one address; there are as many as there are calls."""

    def __init__(
        self,
        name: str,
        url: str,
        key: str | None = None,
        service: Service = "instance",
        *,
        tls: TlsFiles | None = None,
        path: Path | None = None,
        address: str | None = None,
    ) -> None:
        """``name`` is the instance's, for error messages. Both ends of each connection prove to have the cluster's
        ``key``, if there is one, and the server proves to be this ``service`` (:mod:`epd_serve.rpc.cluster`). With
        https both show a certificate of the CA in ``tls``; None: the server one of a public CA. ``path`` is the
        Unix socket of a server that is reached at one, ``address`` that of the URL's host which is meant, where it
        has several.

        Raises ValueError for a URL that is not http(s).
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no URL of an instance; it should look like 'http://10.0.0.1:9000'")
        self.name = name
        self.url = url.rstrip("/")
        self._host = parts.hostname
        self.is_tls = parts.scheme == "https"
        self._port = parts.port or (443 if self.is_tls else 80)
        #: The beginning of every path, and the lines that every request has.
        self.prefix = parts.path.rstrip("/")
        self.headers = f"host: {parts.netloc.rpartition('@')[2]}\r\n"
        self._key = key
        self._service: Service = service
        self._path = path
        self._address = address or self._host
        context = tls.client_context() if tls is not None and self.is_tls else self.is_tls or None
        #: Of a connection: how TLS is made on it.
        self._secured: dict[str, Any] = {}
        if context is not None:
            self._secured = {
                "ssl": context,
                "server_hostname": self._host,
                "ssl_handshake_timeout": TLS_HANDSHAKE_S,
            }
        self._idle: list[Connection] = []
        self._connections: set[Connection] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._closes_old = False
        self._all_closed = asyncio.Event()
        self._all_closed.set()

    @cached_property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The running event loop, kept: asyncio would look it up with a system call each time (CPython 3.11)."""
        return asyncio.get_running_loop()

    def connect(self, call: HttpCall) -> None:
        """Send a call on a new connection."""
        call.connecting = self.loop.create_task(self._connect(call))
        self._connecting.add(call.connecting)
        call.connecting.add_done_callback(self._connecting.discard)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        for task in self._connecting:
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        for connection in list(self._connections):
            connection.transport.abort()
        await self._all_closed.wait()
        self.__dict__.pop("loop", None)  # the next caller may have another one

    def take_idle(self) -> Connection | None:
        if not self._idle:
            return None
        oldest_s = self.loop.time() - KEEP_ALIVE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.idle_since_s >= oldest_s and not connection.transport.is_closing():
                return connection
            connection.transport.abort()
        return None

    async def open(self) -> Connection:
        """A new connection. Raises OSError."""
        if self._path is not None:
            _, connection = await self.loop.create_unix_connection(lambda: Connection(self), str(self._path))
            return connection
        connected = await sockets.connect(self._address, self._port)
        try:
            _, connection = await self.loop.create_connection(
                lambda: Connection(self), sock=connected, **self._secured
            )
        except BaseException:
            connected.close()
            raise
        return connection

    async def _connect(self, call: HttpCall) -> None:
        try:
            connection = await self.open()
        except (OSError, UnicodeError) as error:  # TimeoutError is the one, a host that is no name the other
            call.unreachable(error if isinstance(error, OSError) else OSError(str(error)))
            return
        if call.closed:
            connection.transport.abort()
        elif connection.transport.is_closing():
            call.cut("")
        else:
            # Not before: uvloop never says of a connection whose making was given up that it is lost.
            self._connections.add(connection)
            self._all_closed.clear()
            if self._key is not None and not await self._greet(connection, self._key, call):
                return
            connection.begin(call)

    async def _greet(self, connection: Connection, key: str, call: HttpCall) -> bool:
        """Greet a server; return whether it has proved to have the key.

        If not, the call fails unsent, with the reason.
        """
        address = address_text(*connection.transport.get_extra_info("peername")[:2])
        greeting = Greeting(key, Endpoint(self._service, address))
        hello = HttpCall(self, "POST", HELLO, greeting.headers)
        connection.is_greeting = True
        try:
            connection.begin(hello)
            async with asyncio.timeout(GREETING_S):
                await hello.opened
                await hello.read(MAX_NOTE_BYTES)
            connection.proof = greeting.answer(hello.headers)
        except NotProved:
            call.fail(self._untrusted(""))
        except TimeoutError:
            call.fail(call.lost(f"it did not greet within {GREETING_S:g} s"))
        except ServeError as error:
            call.fail(error if hello.status < 400 else self._untrusted(f" ({hello.status}: {error.message})"))
        else:
            connection.is_greeting = False
            if not connection.transport.is_closing():
                return True
            call.cut("")
        finally:
            hello.close()
            if connection.is_greeting or call.closed:
                connection.transport.abort()
        return False

    def _untrusted(self, reason: str) -> InstanceUntrusted:
        return InstanceUntrusted(
            f"instance {self.name} at {self.url} does not prove that it has this deployment's cluster_key{reason}"
        )

    def put_back(self, connection: Connection) -> None:
        if connection.is_greeting:
            return
        connection.idle_since_s = self.loop.time()
        if not self._closes_old:  # one timer, however often there is none idle
            self._closes_old = True
            self.loop.call_later(KEEP_ALIVE_S, self._close_old)
        self._idle.append(connection)

    def _close_old(self) -> None:
        oldest_s = self.loop.time() - KEEP_ALIVE_S
        for connection in [one for one in self._idle if one.idle_since_s <= oldest_s]:
            self._idle.remove(connection)
            connection.transport.abort()
        self._closes_old = bool(self._idle)
        if self._idle:
            self.loop.call_later(max(0.1, self._idle[0].idle_since_s - oldest_s), self._close_old)

    def lost(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._all_closed.set()
        if connection in self._idle:
            self._idle.remove(connection)
