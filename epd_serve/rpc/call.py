"""A call to a server and its answer, whatever connection carries them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol, Self

from epd_serve.errors import InstanceLost, error_from_response

#: An answer that nobody reads yet is held up to here; then the instance has to wait.
MAX_UNREAD_BYTES = 256 * 1024
#: Of an answer that is read as a whole, unless its reader knows better.
MAX_BODY_BYTES = 256 * 1024**2
#: Of one that says no more than how something went, errors among them.
MAX_NOTE_BYTES = 64 * 1024


class Server(Protocol):
    """The other end of calls; ``name`` is the instance's, for error messages."""

    name: str
    url: str

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...


class RemoteCall:
    """One request and its answer. It must be closed; before the answer's end that breaks the call off.

    Attributes:
        connection: as long as it has the call and there is more to come; None before and after.
        opened: done when the answer's head is there. An answer with status 400 or above is an error, which is set
            here once its body is complete (:func:`epd_serve.errors.error_from_response`); a connection that fails
            is InstanceLost.
    """

    def __init__(self, pool: Server) -> None:
        self._pool = pool
        self.connection: Any = None
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

    @property
    def headers(self) -> dict[bytes, bytes]:
        """Return the answer's headers, names in lower case."""
        if self._lower is None:
            self._lower = {name.lower(): value for name, value in self._headers.items()}
        return self._lower

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
        """Tell the instance that the answer is not wanted, unless it is complete."""
        raise NotImplementedError

    def _hold_back(self) -> None:
        """More is unread than may be: the instance has to wait."""
        raise NotImplementedError

    def _go_on(self) -> None:
        """All that had come was taken: the instance may go on."""
        raise NotImplementedError

    def _take(self) -> bytes:
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._unread_bytes = 0
        return data
