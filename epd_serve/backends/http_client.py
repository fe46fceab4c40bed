"""HTTP/1.1 to one instance over kept-alive connections, for calls by the thousand per second.

A call costs no task: its request is written at once where a connection is idle, and what comes back is handed on
from the event loop's own callbacks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from epd_serve.backends.base import InstanceLost
from epd_serve.backends.http_connection import Connection
from epd_serve.errors import ServeError, error_from_response
from epd_serve.protocol.wire import CLUSTER_HEADER

CONNECT_TIMEOUT_S = 5.0
#: Below the keep-alive time of the instances' server (5 s), so that a call never meets a connection that is just
#: being closed.
KEEP_ALIVE_S = 3.0
#: An answer that nobody reads yet is held up to here; then the instance has to wait.
MAX_UNREAD_BYTES = 256 * 1024


class HttpPool:
    """The connections to one address; there are as many as there are calls."""

    def __init__(self, name: str, url: str, key: str | None = None) -> None:
        """``name`` is the instance's, for error messages; ``key``, if any, is sent along with each call.

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
        self._host_header = parts.netloc.rpartition("@")[2]
        if key is not None:
            self._host_header += f"\r\n{CLUSTER_HEADER}: {key}"
        self._idle: list[Connection] = []
        self._connections: set[Connection] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._closes_old = False
        self._all_closed = asyncio.Event()
        self._all_closed.set()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The running one, which asyncio would look up with a system call each time (CPython 3.11)."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    def head(self, method: str, path: str, headers: str, size: int) -> bytes:
        """Of a request with a body of ``size`` bytes. ``headers`` are lines that end with CR LF."""
        text = (
            f"{method} {self._prefix}{path} HTTP/1.1\r\nhost: {self._host_header}\r\n{headers}"
            f"content-length: {size}\r\n\r\n"
        )
        return text.encode("latin-1")

    def send(self, call: HttpCall) -> None:
        """On an idle connection at once, else on a new one."""
        connection = self._take_idle()
        if connection is not None:
            connection.begin(call)
        else:
            call.connecting = self.loop.create_task(self._connect(call))
            self._connecting.add(call.connecting)
            call.connecting.add_done_callback(self._connecting.discard)

    async def close(self) -> None:
        for task in self._connecting:
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        for connection in list(self._connections):
            connection.abort()
        await self._all_closed.wait()
        self._loop = None

    def _take_idle(self) -> Connection | None:
        if not self._idle:
            return None
        oldest_s = self.loop.time() - KEEP_ALIVE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.idle_since_s >= oldest_s and not connection.is_closing:
                return connection
            connection.abort()
        return None

    async def _connect(self, call: HttpCall) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await self.loop.create_connection(
                    lambda: Connection(self), self._host, self._port, ssl=self._tls or None
                )
        except OSError as error:  # TimeoutError is one
            call.fail(call.lost(str(error) or f"no connection in {CONNECT_TIMEOUT_S:g} s"))
            return
        if call.closed:
            connection.abort()
        elif connection.is_closing:
            call.fail(call.lost("the connection was closed"))
        else:
            # Not before: uvloop never says of a connection whose making was given up that it is lost.
            self._connections.add(connection)
            self._all_closed.clear()
            connection.begin(call)

    def put_back(self, connection: Connection) -> None:
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


class HttpCall:
    """One request and its answer. After :meth:`send`, :meth:`close` must be called; before the answer's end it
    breaks the call off.

    Attributes:
        opened: done when the answer's head is there. An answer with status 400 or above is an error, which is set
            here once its body is complete (:func:`epd_serve.errors.error_from_response`); a connection that fails
            is InstanceLost.
        headers: of the answer, names in lower case.
    """

    def __init__(
        self, pool: HttpPool, method: str, path: str, headers: str = "", body: Sequence[bytes] = ()
    ) -> None:
        self._pool = pool
        self.request = [pool.head(method, path, headers, sum(map(len, body))), *body]
        self.connecting: asyncio.Task[None] | None = None
        self.connection: Connection | None = None
        self.opened: asyncio.Future[Any] = pool.loop.create_future()
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.closed = False
        self._complete = False
        self._failure: Exception | None = None
        self._pieces: list[bytes] = []
        self._unread_bytes = 0
        self._write: Callable[[bytes], bool] | None = None
        self._waiter: asyncio.Future[None] | None = None

    def send(self) -> None:
        self._pool.send(self)

    async def read(self) -> bytes:
        """The whole body. Raises InstanceLost where it breaks off."""
        while not self._complete:
            if self._failure is not None:
                raise self._failure
            self._resume()
            await self._wait()
        return self._take()

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes, never empty pieces. Raises InstanceLost where it breaks off."""
        while True:
            if self._pieces:
                chunk = self._take()
                self._resume()
                yield chunk
            elif self._complete:
                return
            elif self._failure is not None:
                raise self._failure
            else:
                await self._wait()

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
        if self.status:
            return InstanceLost(f"instance {self._pool.name} broke off its answer ({reason})")
        return InstanceLost(f"instance {self._pool.name} at {self._pool.url} is not reachable ({reason})")

    # What follows is called by the connection.

    def begin(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.status = status
        self.headers = headers
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
        self._wake()
        if self._unread_bytes > MAX_UNREAD_BYTES and self.connection is not None:
            self.connection.pause()

    def end(self) -> None:
        self._complete = True
        self.connection = None
        if self.status >= 400 and not self.opened.done():
            self.opened.set_exception(self.error(self._take()))
        self._wake()

    def error(self, body: bytes) -> ServeError:
        """What an answer with status 400 or above means."""
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
