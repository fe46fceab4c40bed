"""Locks by which the owner of a region sees that a process on its host is in the middle of writing into it.

A writer looks at its lease and then copies. Stopped between the two or within the copy (SIGSTOP, a debugger, a
machine that swaps), it may go on after its lease has ended, when the blocks are somebody else's. So:

1. The writer takes the lock of its transfer, looks at its clock, copies, gives the lock back.
2. The writer's deadline lies before the owner's: it counts half a lease from when it asked, the owner a whole
   lease from when it was asked, and both on the one monotonic clock of the host.
3. The owner takes blocks back after its own deadline, and then only if the lock is not held at that moment.

If the owner finds the lock free, a writer that takes it later finds its deadline past and copies nothing. If the
lock is held, the blocks stay out of use until the copy is over or the kernel has taken the lock from a dead
process.

The locks are open-file-description locks (fcntl(2)) on the region's memfd, one byte for each transfer: at the
number of the first block that it writes, which is its own for as long as it may write. They do not reach across
hosts. Writers there come over TCP, where the owner's side knows what is under way
(:mod:`epd_serve.transfer.write_gate`), or over Mooncake: there one that is stopped between its look at the clock
and its copy, or within it, for more than half a lease, can still do harm.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from epd_serve.protocol.wire import Region
from epd_serve.transfer.shared_memory import host_id, is_there, open_region
from epd_serve.transfer.transport import TransferError

#: struct flock of 64-bit Linux: type, whence, start, length, pid (0 for these locks).
_FLOCK = struct.Struct("@hhqqi4x")


class _LockFile:
    """A region's memfd, open until its last user has let it go."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self._fd = open_region(region)
        weakref.finalize(self, os.close, self._fd)

    def set(self, kind: int, slot: int) -> None:
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, slot, 1, 0))


class WriteLocks:
    """The writer's side. Safe from any thread; no two threads may hold one slot of one region at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[str, _LockFile] = {}

    @contextmanager
    def held(self, region: Region, slots: Sequence[int]) -> Iterator[None]:
        """Hold the locks of transfers into ``region``. Raises TransferError where its process is gone.

        There are none for a region on another host, or of a process that this one may not look into.
        """
        file = self._open(region) if region.host_id == host_id() else None
        if file is None:
            yield
            return
        taken: list[int] = []
        try:
            for slot in slots:
                file.set(fcntl.F_RDLCK, slot)
                taken.append(slot)
            yield
        finally:
            for slot in taken:
                file.set(fcntl.F_UNLCK, slot)

    def close(self) -> None:
        with self._lock:
            self._files.clear()

    def _open(self, region: Region) -> _LockFile | None:
        with self._lock:
            known = self._files.get(region.name)
            if known is not None:
                return known
            try:
                file = _LockFile(region)
            except TransferError as error:
                if isinstance(error.__cause__, PermissionError):  # another user's: reached over TCP all the same
                    return None
                raise
            for name, other in list(self._files.items()):
                if not is_there(other.region):
                    del self._files[name]
            self._files[region.name] = file
            return file


def is_being_written(region: Region, slot: int) -> bool:
    """The owner's side: whether a writer holds the lock of the transfer with this slot."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, slot, 1, 0)
    found: int = _FLOCK.unpack(fcntl.fcntl(region.fd, fcntl.F_OFD_GETLK, asked))[0]
    return found != fcntl.F_UNLCK
