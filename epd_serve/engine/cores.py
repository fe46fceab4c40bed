"""The division of a machine's cores among the instances that compute at the moment."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from zlib import crc32

from device.base import BareDevice

_SLOTS = 1024


class Cores:
    """The threads of an instance on a CPU: an equal part for each side that computes, here and in other instances.

    The sides of an instance are its language model (0) and its tower (1). The board that the instances share has
    an entry for each: the id of its process while it computes, else 0. Processes that died count for nothing.

    Args:
        num_threads: those of a side that computes alone.
        board: a file that the instances of the machine share; None: the threads belong to this instance.
        name: of the instance.
    """

    def __init__(self, device: BareDevice, num_threads: int, board: Path | None, name: str) -> None:
        """Raises OSError for a file that cannot be made."""
        self._device = device
        self._num_threads = num_threads
        memory: bytearray | mmap.mmap = bytearray(_SLOTS * 2 * 8)
        if board is not None:
            descriptor = os.open(board, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.ftruncate(descriptor, len(memory))
                memory = mmap.mmap(descriptor, len(memory))
            finally:
                os.close(descriptor)
        self._pids = memoryview(memory).cast("q")
        self._first = 2 * (crc32(name.encode()) % _SLOTS)
        self._pids[self._first] = self._pids[self._first + 1] = 0

    def begin(self, side: int) -> None:
        """Note that a side computes, on this thread, with its part of the threads from now on."""
        self._pids[self._first + side] = own = os.getpid()
        pids = filter(None, self._pids.tolist())
        num_sides = sum(pid == own or Path(f"/proc/{pid}").exists() for pid in pids)
        self._device.set_threads(max(1, self._num_threads // num_sides))

    def end(self, side: int) -> None:
        self._pids[self._first + side] = 0
