"""One HTTP request to an instance, and its answer as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

from epd_serve.errors import InstanceLost, InstanceUnreachable, ServeError, error_from_response

if TYPE_CHECKING:
    from epd_serve.backends.http_client import HttpPool
    from epd_serve.backends.http_connection import Connection

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
        headers: the answer's, names in lower case.
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
        if self.status:
            return InstanceLost(f"instance {self._pool.name} broke off its answer ({reason})")
        return InstanceLost(f"instance {self._pool.name} at {self._pool.url} is not reachable ({reason})")

    def unreachable(self, error: OSError) -> InstanceLost:
        is_refused = isinstance(error, ConnectionRefusedError)
        return InstanceUnreachable(self.lost(str(error)).message, is_refused=is_refused)

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

    def error(self, body: bytes) -> ServeError:
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
