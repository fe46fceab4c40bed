"""Registered memory through which bytes pass that lie in memory which is not registered."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from epd_serve.transfer.shared_memory import SharedSlab
from epd_serve.transfer.slab_allocator import SlabAllocator
from epd_serve.transfer.transport import TransferError


def address_of(memory: memoryview) -> int:
    """The address of writable, contiguous, non-empty memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Staged:
    """A part of the pool.

    Attributes:
        address: address of its first byte. memory: its bytes.
        lost: set it where something may still use the part; it is then never given out again.
    """

    __slots__ = ("address", "lost", "memory")

    def __init__(self, address: int, memory: memoryview) -> None:
        self.address = address
        self.memory = memory
        self.lost = False


class StagingPool:
    """A bounded pool; takers wait for room. Safe from any thread."""

    def __init__(self, nbytes: int, alignment: int) -> None:
        size = -(-nbytes // alignment) * alignment
        self._slab = SharedSlab("staging", size, alignment=alignment)
        self._allocator = SlabAllocator(size)
        self._changed = threading.Condition()
        self._num_taken = 0
        self.address = address_of(self._slab.buffer)
        self.nbytes = size

    @property
    def num_taken(self) -> int:
        """Parts that are in use or lost."""
        return self._num_taken

    @contextmanager
    def take(self, nbytes: int, timeout_s: float) -> Iterator[Staged]:
        """A part of ``nbytes``. Raises TransferError where there is no room within ``timeout_s``, or ever."""
        offset = self._allocate(nbytes, timeout_s)
        staged = Staged(self.address + offset, self._slab.buffer[offset : offset + nbytes])
        try:
            yield staged
        finally:
            if not staged.lost:
                with self._changed:
                    self._allocator.free(offset)
                    self._num_taken -= 1
                    self._changed.notify_all()

    def close(self) -> None:
        self._slab.close()

    def check_integrity(self) -> None:
        with self._changed:
            self._allocator.check_integrity()

    def _allocate(self, nbytes: int, timeout_s: float) -> int:
        if nbytes > self._allocator.capacity:
            raise TransferError(
                f"{nbytes} bytes do not fit a staging pool of {self._allocator.capacity}; "
                "raise mooncake.staging_bytes"
            )
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (offset := self._allocator.allocate(nbytes)) is None:
                if not self._changed.wait(deadline - time.monotonic()):
                    raise TransferError(f"no room for {nbytes} bytes in the staging pool within {timeout_s:g} s")
            self._num_taken += 1
            return offset
