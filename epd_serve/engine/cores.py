"""Division of a machine's cores among the instances that are computing."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from zlib import crc32

from device.base import BareDevice

_SLOTS = 1024


class Cores:
    """Threads of an instance on a CPU: an equal part for each computing side of all instances.

    The sides of an instance are its language model (0) and its tower (1). The shared board has an entry per side:
    its process id while it computes, otherwise 0. Dead processes do not count.

    Args:
        num_threads: threads of a side that computes alone.
        board: a file shared by the instances of the machine; None: this instance owns the threads.
        name: name of the instance.
    """

    def __init__(self, device: BareDevice, num_threads: int, board: Path | None, name: str) -> None:
        """Raises OSError if the file cannot be created."""
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
        """Mark a side as computing on this thread and set its number of threads."""
        self._pids[self._first + side] = own = os.getpid()
        pids = filter(None, self._pids.tolist())
        num_sides = sum(pid == own or Path(f"/proc/{pid}").exists() for pid in pids)
        self._device.set_threads(max(1, self._num_threads // num_sides))

    def end(self, side: int) -> None:
        self._pids[self._first + side] = 0
