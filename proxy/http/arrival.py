"""The arrival of a request: slow senders hold neither connections nor memory for ever, large bodies take turns.

Large bodies are read a few at a time, in few pieces, and their memory goes back to the system. Read all at once,
each would take as long as all together, and the memory of all of them. A body that comes as fast as the network
has it would wake this process up for each few packets (SO_RCVLOWAT, socket(7) and tcp(7)). The C library keeps
what is freed below the last piece in use of its heap, so that a gateway would stay as large as in its worst moment
(malloc_trim(3)); C libraries other than glibc are left alone.
"""

from __future__ import annotations

import asyncio
import ctypes
import resource
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import msgspec

from epd_serve.config import GatewayConfig
from epd_serve.errors import InvalidRequest
from epd_serve.rpc.bounded import GRACE_S


class TooSlow(InvalidRequest):
    """The body did not arrive in time; the connection cannot be used again."""

    status: ClassVar[int] = 408
    default_code: ClassVar[str | None] = "request_timeout"


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrivalLimits:
    """Seconds for a request line with its headers and for a body, and the fewest bytes of a body per second."""

    header_s: float
    body_s: float
    min_body_rate: float

    @classmethod
    def of(cls, gateway: GatewayConfig) -> ArrivalLimits:
        return cls(
            header_s=gateway.header_timeout_s, body_s=gateway.body_timeout_s, min_body_rate=gateway.min_body_rate
        )

    def time_for_body(self, declared: int | None) -> float:
        """Return the seconds for a body: ``GRACE_S`` and what its Content-Length, ``declared``, allows."""
        return self.body_s if declared is None else min(self.body_s, GRACE_S + declared / self.min_body_rate)

    def too_slow(self, declared: int | None) -> TooSlow:
        return TooSlow(f"the body did not arrive within {self.time_for_body(declared):.3g} s; send it faster")


#: Smaller ones are read as they come.
LARGE_BYTES = 64 * 1024


class Turns:
    """The turns of one event loop.

    Args:
        max_bytes: while there are so many in turns that have not ended, no other one begins ...
        patience_s: ... for so long: a client that sends slowly does not hold up the others.

    Attributes:
        num_bytes: in turns that have begun and not ended.
    """

    def __init__(self, max_bytes: int = 8 << 20, patience_s: float = 0.1) -> None:
        self._max_bytes = max_bytes
        self._patience_s = patience_s
        self.num_bytes = 0
        self._waiting: dict[Turn, asyncio.TimerHandle] = {}  # the oldest first

    def ask(self, loop: asyncio.AbstractEventLoop, nbytes: int, on_begin: Callable[[], None]) -> Turn:
        """A turn for ``nbytes``, which must be ended. ``on_begin`` is called unless it has begun already."""
        turn = Turn(self, nbytes, on_begin)
        if self.num_bytes < self._max_bytes:
            turn.has_begun = True
            self.num_bytes += nbytes
        else:
            self._waiting[turn] = loop.call_later(self._patience_s, self._begin, turn)
        return turn

    def end(self, turn: Turn) -> None:
        """Whether it has begun or not; once."""
        if turn.has_begun:
            self.num_bytes -= turn.nbytes
        else:
            self._waiting.pop(turn).cancel()
        while self._waiting and self.num_bytes < self._max_bytes:
            self._begin(next(iter(self._waiting)))

    def _begin(self, turn: Turn) -> None:
        self._waiting.pop(turn).cancel()
        turn.has_begun = True
        self.num_bytes += turn.nbytes
        turn.on_begin()


class Turn(msgspec.Struct, eq=False):
    """See :meth:`Turns.ask`."""

    turns: Turns
    nbytes: int
    on_begin: Callable[[], None]
    has_begun: bool = False

    def end(self) -> None:
        self.turns.end(self)


#: Less than this is as soon set to zero.
_ZEROED_BYTES = 32 * 1024

_resize = ctypes.pythonapi.PyByteArray_Resize
_resize.argtypes = (ctypes.py_object, ctypes.c_ssize_t)
_resize.restype = ctypes.c_int


def buffer(size: int) -> bytearray:
    """``size`` bytes to be written before they are read: what is in them nobody knows. ``bytearray(size)`` would
    write megabytes of zeros first."""
    if size < _ZEROED_BYTES:
        return bytearray(size)
    room = bytearray()
    _resize(room, size)
    return room


#: So much is waited for, while it is still to come: the system has to hold it meanwhile.
MARK_BYTES = 256 * 1024


class LowWater:
    """The mark of one connection: bytes that have to be there before this process is told of them."""

    __slots__ = ("_mark", "_socket")

    def __init__(self, transport: asyncio.BaseTransport) -> None:
        own: socket.socket | None = transport.get_extra_info("socket")
        is_plain = own is not None and own.family in (socket.AF_INET, socket.AF_INET6)
        self._socket = own if is_plain and transport.get_extra_info("sslcontext") is None else None
        self._mark = 1

    def expect(self, nbytes: int) -> None:
        """Say how many bytes are still to come for certain; 0 or less: none. It may be said again at any time."""
        mark = MARK_BYTES if nbytes >= MARK_BYTES else 1
        if mark != self._mark and self._socket is not None:
            self._mark = mark
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, mark)


_EVERY_S = 2.0
#: Less is not worth the work.
_MIN_BYTES = 16 << 20
#: What grew by more since the last look is still in its burst.
_STEADY_BYTES = 4 << 20
_STATM = Path("/proc/self/statm")


async def give_back() -> None:
    """Gives the memory that a burst of large bodies took back to the system, for as long as the process lives."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "malloc_trim"):
        return
    try:
        growth = Growth(resident_bytes)
    except OSError:  # there is no /proc: the gateway serves all the same
        return
    while True:
        await asyncio.sleep(_EVERY_S)
        with suppress(OSError):  # no descriptor is free: the next look finds one
            if growth.has_ended():
                await asyncio.to_thread(library.malloc_trim, 0)
                growth.start_again()


def resident_bytes() -> int:
    """Return the resident bytes of this process."""
    return int(_STATM.read_text().split()[1]) * resource.getpagesize()


class Growth:
    """The growth of a process since its memory was last given back."""

    def __init__(self, resident: Callable[[], int]) -> None:
        self._resident = resident
        self.start_again()

    def start_again(self) -> None:
        self._least = self._last = self._resident()

    def has_ended(self) -> bool:
        """Whether there was some, and none is left since the last look."""
        now, last = self._resident(), self._last
        self._last = now
        self._least = min(self._least, now)
        return now >= self._least + _MIN_BYTES and now <= last + _STEADY_BYTES
