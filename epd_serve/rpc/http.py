"""HTTP/1.1 to one server over kept-alive connections, for calls by the thousand per second.

A call costs no task: its request is written at once where a connection is idle, and what comes back is handed on
from the event loop's own callbacks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Self, cast
from urllib.parse import urlsplit

import httptools

from epd_serve.errors import InstanceUnreachable, InstanceUntrusted, ServeError, error_from_response
from epd_serve.rpc import sockets
from epd_serve.rpc.call import MAX_BODY_BYTES, MAX_NOTE_BYTES, RemoteCall
from epd_serve.rpc.cluster import HELLO, Greeting, NotProved, address_text
from epd_serve.rpc.descriptors import shortage
from epd_serve.rpc.tls import TlsFiles


class HttpCall(RemoteCall):
    """A call over HTTP. After :meth:`send`, :meth:`close` must be called; before the answer's end it breaks the
    call off, by closing the connection.

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
        self.request = [pool.head(method, path, headers, sum(map(len, body))), *body]
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

    def _break_off(self) -> None:
        if self.connecting is not None and not self.connecting.done():
            self.connecting.cancel()
        if self.connection is not None:
            self.connection.abort()
            self.connection = None

    def _hold_back(self) -> None:
        if self.connection is not None:
            self.connection.pause()

    def _go_on(self) -> None:
        if self.connection is not None:
            self.connection.resume()


class Upgrade(HttpCall):
    """A call by which a connection of its own changes from HTTP to another protocol (RFC 9110, section 7.8).

    ``opened`` gives what ``make`` has made of the transport: who has the connection from there on. A server that
    answers in HTTP speaks another version: InstanceUntrusted.
    """

    keeps_connection = False

    def __init__(
        self, pool: HttpPool, path: str, protocol: str, make: Callable[[asyncio.Transport], asyncio.Protocol]
    ) -> None:
        headers = f"connection: upgrade\r\nupgrade: {protocol}\r\n"
        super().__init__(pool, "GET", path, headers, on_new_connection=True)
        self._protocol = protocol
        self._make = make

    def begin(self, status: int, headers: dict[bytes, bytes]) -> None:
        super().begin(max(status, 400), headers)

    def error(self, body: bytes) -> Exception:
        told = error_from_response(self.status, body, origin=f"instance {self._pool.name}")
        if self.status in (401, 403, 503):
            return told
        return InstanceUntrusted(
            f"instance {self._pool.name} at {self._pool.url} does not speak {self._protocol}: it has another "
            f"version of epd-serve than its caller ({told.message})"
        )

    def upgraded(self, transport: asyncio.Transport, rest: bytes) -> None:
        """The server has agreed."""
        self.connection = None
        if self.opened.done():
            transport.abort()
            return
        made = self._make(transport)
        transport.set_protocol(made)
        self.opened.set_result(made)
        if rest:
            made.data_received(rest)


MAX_HEAD_BYTES = 64 * 1024


class Connection(asyncio.Protocol):
    """Parses answers; one call at a time."""

    def __init__(self, pool: HttpPool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport
        self.idle_since_s = 0.0
        self._call: HttpCall | None = None
        self._headers: dict[bytes, bytes] = {}
        self._pieces: list[bytes] = []
        self._head_bytes = 0
        self._begun = self._ended = self._reusable = self._paused = False
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
        self._transport.writelines(request)

    @property
    def is_closing(self) -> bool:
        return self._transport.is_closing()

    @property
    def peer_address(self) -> tuple[str, int]:
        host, port = self._transport.get_extra_info("peername")[:2]
        return host, port

    def abort(self) -> None:
        self._transport.abort()

    def pause(self) -> None:
        if not self._paused and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by name

    def data_received(self, data: bytes) -> None:
        call = self._call
        if call is None:  # nobody has asked: the server wants to end the connection, or is not in its senses
            self._transport.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._give_up(str(error), is_http=False)
            return
        except httptools.HttpParserUpgrade as agreed:
            self._call = None
            self._pool.lost(self)
            if isinstance(call, Upgrade):
                call.upgraded(self._transport, data[agreed.args[0] :])
            else:
                self._transport.abort()
                call.cut("it changes to a protocol that was not asked for", is_http=False)
            return
        if not self._begun:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._give_up(f"the head of its answer has more than {MAX_HEAD_BYTES} bytes")
            return
        if pieces := self._pieces:
            piece = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            call.receive(piece)
        if self._ended and self._call is call:
            self._call = None
            # An answer before its request was out leaves the rest of the request on the connection.
            reusable = self._reusable and call.keeps_connection
            if reusable and not self._transport.get_write_buffer_size():
                self.resume()
                self._pool.put_back(self)
            else:
                self._transport.abort()
            call.end()

    def connection_lost(self, error: Exception | None) -> None:
        self._pool.lost(self)
        call, self._call = self._call, None
        if call is not None:
            call.cut((str(error) or type(error).__name__) if error else "")

    def _give_up(self, reason: str, *, is_http: bool = True) -> None:
        call, self._call = self._call, None
        self._transport.abort()
        if call is not None:
            call.cut(reason, is_http=is_http)

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
#: Below the keep-alive time of the instances' server (5 s), so that a call never meets a connection that is just
#: being closed.
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
        *,
        tls: TlsFiles | None = None,
        path: Path | None = None,
        address: str | None = None,
    ) -> None:
        """``name`` is the instance's, for error messages; both ends of each connection prove to have the cluster's
        ``key``, if there is one (:mod:`epd_serve.rpc.cluster`). With https both show a certificate of the CA in
        ``tls``; None: the server one of a public CA. ``path`` is the Unix socket of a server that is reached at
        one, ``address`` that of the URL's host which is meant, where it has several.

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
        self._prefix = parts.path.rstrip("/")
        #: The lines that every request has.
        self._headers = f"host: {parts.netloc.rpartition('@')[2]}\r\n"
        self._key = key
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

    def head(self, method: str, path: str, headers: str, size: int) -> bytes:
        """The head of a request with a body of ``size`` bytes. ``headers`` are lines that end with CR LF."""
        text = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}{headers}content-length: {size}\r\n\r\n"
        return text.encode("latin-1")

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
            connection.abort()
        await self._all_closed.wait()
        self.__dict__.pop("loop", None)  # the next caller may have another one

    def take_idle(self) -> Connection | None:
        if not self._idle:
            return None
        oldest_s = self.loop.time() - KEEP_ALIVE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.idle_since_s >= oldest_s and not connection.is_closing:
                return connection
            connection.abort()
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
            connection.abort()
        elif connection.is_closing:
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
        greeting = Greeting(key, address_text(*connection.peer_address))
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
            if not connection.is_closing:
                return True
            call.cut("")
        finally:
            hello.close()
            if connection.is_greeting or call.closed:
                connection.abort()
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
            connection.abort()
        self._closes_old = bool(self._idle)
        if self._idle:
            self.loop.call_later(max(0.1, self._idle[0].idle_since_s - oldest_s), self._close_old)

    def lost(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._all_closed.set()
        if connection in self._idle:
            self._idle.remove(connection)
