"""HTTP/1.1 to one server over kept-alive connections, for calls by the thousand per second.

A call costs no task: its request is written at once where a connection is idle, and what comes back is handed on
from the event loop's own callbacks.
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
from epd_serve.rpc.cluster import HELLO, Greeting, NotProved, address_text
from epd_serve.rpc.descriptors import shortage

#: An answer that nobody reads yet is held up to here; then the instance has to wait.
MAX_UNREAD_BYTES = 256 * 1024
#: Of an answer that is read as a whole, unless its reader knows better.
MAX_BODY_BYTES = 256 * 1024**2
#: Of one that says no more than how something went, errors among them.
MAX_NOTE_BYTES = 64 * 1024


class HttpCall:
    """One request and its answer. After :meth:`send`, :meth:`close` must be called; before the answer's end it
    breaks the call off.

    Attributes:
        opened: done when the answer's head is there. An answer with status 400 or above is an error, which is set
            here once its body is complete (:func:`epd_serve.errors.error_from_response`); a connection that fails
            is InstanceLost.
        on_new_connection: whether a kept-alive one will not do, which may be to a host that is gone since.
    """

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
        self._pool = pool
        self.on_new_connection = on_new_connection
        self.request = [pool.head(method, path, headers, sum(map(len, body))), *body]
        self.connecting: asyncio.Task[None] | None = None
        self.connection: Connection | None = None
        self.opened: asyncio.Future[Any] = pool.loop.create_future()
        self.status = 0
        self._headers: dict[bytes, bytes] = {}
        self._lower: dict[bytes, bytes] | None = None
        self.closed = False
        self._complete = False
        self._failure: Exception | None = None
        self._pieces: list[bytes] = []
        self._unread_bytes = 0
        self._write: Callable[[bytes], bool] | None = None
        self._waiter: asyncio.Future[None] | None = None

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

    async def read(self, max_bytes: int = MAX_BODY_BYTES) -> bytes:
        """The whole body. Raises InstanceLost where it breaks off, or has more than ``max_bytes``."""
        while not self._complete and self._unread_bytes <= max_bytes:
            if self._failure is not None:
                raise self._failure
            self._resume()
            await self._wait()
        if self._unread_bytes > max_bytes:
            self.close()
            raise InstanceLost(f"instance {self._pool.name} answered with more than {max_bytes} bytes")
        return self._take()

    def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes, never empty pieces. Raises InstanceLost where it breaks off."""
        return _Chunks(self)

    async def next_chunk(self) -> bytes:
        """The next of :meth:`chunks`; empty behind the last."""
        while not self._pieces and not self._complete:
            if self._failure is not None:
                raise self._failure
            await self._wait()
        chunk = self._take()
        self._resume()
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
            self._resume()
            try:
                await self._wait()
            finally:
                self._write = None
        if self._failure is not None and not self._pieces:
            raise self._failure
        return self._complete and not self._pieces

    def close(self) -> None:
        """Break the call off unless its answer is complete; closing its connection tells the instance."""
        self.closed = True
        if self.connecting is not None and not self.connecting.done():
            self.connecting.cancel()
        if self.connection is not None:
            self.connection.abort()
            self.connection = None
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

    @property
    def headers(self) -> dict[bytes, bytes]:
        """Return the answer's headers, names in lower case."""
        if self._lower is None:
            self._lower = {name.lower(): value for name, value in self._headers.items()}
        return self._lower

    # What follows is called by the pool and the connection.

    def unreachable(self, error: OSError) -> None:
        """No connection could be made."""
        is_refused = isinstance(error, ConnectionRefusedError)
        lost = InstanceUnreachable(self.lost(str(error)).message, is_refused=is_refused)
        self.fail(shortage(error) or lost)

    def cut(self, reason: str, *, is_http: bool = True) -> None:
        """The connection has ended before the answer did; ``reason`` is "" where the server has closed it."""
        self.fail(self.lost(reason if is_http else f"no HTTP answer: {reason}"))

    def begin(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.status = status
        self._headers = headers
        if status < 400 and not self.opened.done():
            self.opened.set_result(self)

    def feed(self, pieces: list[bytes]) -> None:
        """Take pieces of the body; empties the list."""
        if self._write is not None:
            data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            try:
                more = self._write(data)
            except Exception as error:  # noqa: BLE001 - the one who waits in forward() gets it
                more = False
                self._failure = error
            if not more:
                self._write = None
                self._wake()
            return
        self._unread_bytes += sum(map(len, pieces))
        self._pieces += pieces
        pieces.clear()
        if self.status >= 400 and self._unread_bytes > MAX_NOTE_BYTES and not self.opened.done():
            self.opened.set_exception(self.error(self._take()[:MAX_NOTE_BYTES]))
            self.close()
            return
        self._wake()
        if self._unread_bytes > MAX_UNREAD_BYTES and self.connection is not None:
            self.connection.pause()

    def end(self) -> None:
        self._complete = True
        self.connection = None
        if self.status >= 400 and not self.opened.done():
            self.opened.set_exception(self.error(self._take()))
        self._wake()

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
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = self._pool.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _take(self) -> bytes:
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._unread_bytes = 0
        return data

    def _resume(self) -> None:
        if self.connection is not None:
            self.connection.resume()


class _Chunks:
    def __init__(self, call: HttpCall) -> None:
        self._call = call

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        chunk = await self._call.next_chunk()
        if not chunk:
            raise StopAsyncIteration
        return chunk


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
        if not self._begun:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._give_up(f"the head of its answer has more than {MAX_HEAD_BYTES} bytes")
            return
        if self._pieces:
            call.feed(self._pieces)
        if self._ended and self._call is call:
            self._call = None
            # An answer before its request was out leaves the rest of the request on the connection.
            if self._reusable and not self._transport.get_write_buffer_size():
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
#: Below the keep-alive time of the instances' server (5 s), so that a call never meets a connection that is just
#: being closed.
KEEP_ALIVE_S = 3.0
#: How long a server may take to prove that it has the cluster's key.
GREETING_S = 10.0


class HttpPool:
    """The connections to one address; there are as many as there are calls."""

    def __init__(self, name: str, url: str, key: str | None = None, *, path: Path | None = None) -> None:
        """``name`` is the instance's, for error messages; both ends of each connection prove to have the cluster's
        ``key``, if there is one (:mod:`epd_serve.rpc.cluster`). ``path`` is the Unix socket of a server that is
        reached at one.

        Raises ValueError for a URL that is not http(s).
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no URL of an instance; it should look like 'http://10.0.0.1:9000'")
        self.name = name
        self.url = url.rstrip("/")
        self._host = parts.hostname
        self._tls = parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        #: The lines that every request has.
        self._headers = f"host: {parts.netloc.rpartition('@')[2]}\r\n"
        self._key = key
        self._path = path
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
        connected = await sockets.connect(self._host, self._port)
        try:
            _, connection = await self.loop.create_connection(
                lambda: Connection(self),
                sock=connected,
                ssl=self._tls or None,
                server_hostname=self._host if self._tls else None,
                ssl_handshake_timeout=TLS_HANDSHAKE_S if self._tls else None,
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
