"""HTTP/1.1 to one instance over kept-alive connections, for calls by the thousand per second.

A call costs no task: its request is written at once where a connection is idle, and what comes back is handed on
from the event loop's own callbacks.
"""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

from epd_serve.backends.http_call import HttpCall
from epd_serve.backends.http_connection import Connection
from epd_serve.protocol.wire import CLUSTER_HEADER

CONNECT_TIMEOUT_S = 5.0
#: Below the keep-alive time of the instances' server (5 s), so that a call never meets a connection that is just
#: being closed.
KEEP_ALIVE_S = 3.0


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
        #: The lines that every request has.
        self._headers = f"host: {parts.netloc.rpartition('@')[2]}\r\n"
        if key is not None:
            self._headers += f"{CLUSTER_HEADER}: {key}\r\n"
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
        text = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}{headers}content-length: {size}\r\n\r\n"
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
