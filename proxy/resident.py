"""Memory that a burst of large bodies took goes back to the system.

The C library keeps what is freed below the last piece in use of its heap, so that a gateway would stay as large as
in its worst moment (malloc_trim(3)). Other C libraries than glibc are left alone.
"""

from __future__ import annotations

import asyncio
import ctypes
import resource
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_EVERY_S = 2.0
#: Less is not worth the work.
_MIN_BYTES = 16 << 20
#: What grew by more since the last look is still in its burst.
_STEADY_BYTES = 4 << 20
_STATM = Path("/proc/self/statm")


async def give_back() -> None:
    """Go on doing so, for as long as the process lives."""
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
    """Of this process."""
    return int(_STATM.read_text().split()[1]) * resource.getpagesize()


class Growth:
    """Of a process since its memory was last given back."""

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
