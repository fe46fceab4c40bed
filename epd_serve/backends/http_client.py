"""HTTP/1.1 to one instance over kept-alive connections, for calls by the thousand per second.

A call costs no task: its request is written at once where a connection is idle, and what comes back is handed on
from the event loop's own callbacks.
"""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

from epd_serve.backends.http_call import MAX_NOTE_BYTES, HttpCall
from epd_serve.backends.http_connection import Connection
from epd_serve.errors import InstanceUntrusted, ServeError
from epd_serve.rpc import sockets
from epd_serve.rpc.cluster import HELLO, Greeting, NotProved, address_text
from epd_serve.rpc.descriptors import shortage

TLS_HANDSHAKE_S = 5.0
#: Below the keep-alive time of the instances' server (5 s), so that a call never meets a connection that is just
#: being closed.
KEEP_ALIVE_S = 3.0
#: How long a server may take to prove that it has the cluster's key.
GREETING_S = 10.0


class HttpPool:
    """The connections to one address; there are as many as there are calls."""

    def __init__(self, name: str, url: str, key: str | None = None) -> None:
        """``name`` is the instance's, for error messages; both ends of each connection prove to have the cluster's
        ``key``, if there is one (:mod:`epd_serve.rpc.cluster`).

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
        self._idle: list[Connection] = []
        self._connections: set[Connection] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._closes_old = False
        self._all_closed = asyncio.Event()
        self._all_closed.set()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The running event loop, kept: asyncio would look it up with a system call each time (CPython 3.11)."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    def head(self, method: str, path: str, headers: str, size: int) -> bytes:
        """The head of a request with a body of ``size`` bytes. ``headers`` are lines that end with CR LF."""
        text = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}{headers}content-length: {size}\r\n\r\n"
        return text.encode("latin-1")

    def send(self, call: HttpCall) -> None:
        """Send a call on an idle connection, or on a new one where none is idle or the call asks for that."""
        connection = None if call.on_new_connection else self._take_idle()
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
        except OSError as error:  # TimeoutError is one
            call.fail(shortage(error) or call.unreachable(error))
            return
        if call.closed:
            connection.abort()
        elif connection.is_closing:
            call.fail(call.lost("the connection was closed"))
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
            call.fail(call.lost("the connection was closed"))
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
