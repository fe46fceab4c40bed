"""Shared memory on one host that no crash can leak.

A slab is an anonymous memfd; peers map it through ``/proc/<pid>/fd/<fd>``. The kernel frees it with the last
process that maps it, so nothing stays behind in ``/dev/shm`` even after SIGKILL.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import uuid
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from epd_serve.protocol.wire import Region
from epd_serve.transfer.transport import Piece, TransferError, check_bounds

# Linux, on every architecture; the mmap module has neither.
_MAP_FIXED = 0x10
_PROT_NONE = 0


@cache
def host_id() -> str:
    """Name of this kernel and pid namespace: equal for two processes that can map each other's memory."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{Path('/proc/self/ns/pid').readlink()}"


class SharedSlab:
    """Zeroed memory of this process that peers on the same host can map.

    Args:
        alignment: power of two that the address of the memory is a multiple of, as a transport may need.

    Raises ValueError where so much memory is not to be had.
    """

    def __init__(self, name: str, nbytes: int, *, host: str = "", port: int = 0, alignment: int = 1) -> None:
        self._name = f"{name}-{uuid.uuid4().hex}"  # unique, so that a reused pid and fd cannot be mistaken for it
        self._fd = os.memfd_create(self._name, os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._fd, nbytes)
            if alignment <= mmap.PAGESIZE:
                self.buffer = memoryview(mmap.mmap(self._fd, nbytes))
            else:
                self.buffer = _map_aligned(self._fd, nbytes, alignment)
        except OSError as error:
            self.close()
            raise ValueError(
                f"{nbytes >> 20} MiB of memory for {name!r} are not to be had ({error.strerror}): have less of it "
                "(num_blocks, feature_store_bytes), or raise the limit of memory (ulimit -v, the cgroup's)"
            ) from error
        self.region = Region(
            name=self._name, nbytes=nbytes, host_id=host_id(), pid=os.getpid(), fd=self._fd, host=host, port=port
        )

    def close(self) -> None:
        """Close the descriptor; the memory itself lives until the last view of it is gone."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _map_aligned(fd: int, nbytes: int, alignment: int) -> memoryview:
    """A shared mapping of ``fd`` at a multiple of ``alignment``; it goes with its last view."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    def mapped(address: int | None, size: int, protection: int, flags: int, file: int) -> int:
        result: int = libc.mmap(address, size, protection, flags, file, 0)
        if result == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), f"mmap of {size} bytes")
        return result

    # room for an aligned start is reserved first; the file is then mapped over a part of it
    reserved = nbytes + alignment
    start = mapped(None, reserved, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    address = -(-start // alignment) * alignment
    mapped(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
    memory = (ctypes.c_char * nbytes).from_address(address)
    weakref.finalize(memory, libc.munmap, start, reserved).atexit = False
    return memoryview(memory).cast("B")


class SharedMemoryPeers:
    """Reads and writes regions of other processes on this host through mappings that are made once and kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._maps: dict[str, tuple[Region, mmap.mmap]] = {}

    def write(self, region: Region, pieces: Sequence[Piece], transfer_ids: Sequence[str]) -> None:
        """The transfers are guarded by :class:`~epd_serve.transfer.write_locks.WriteLocks`."""
        check_bounds(region.name, region.nbytes, pieces)
        target = memoryview(self._map(region))
        for offset, data in pieces:
            target[offset : offset + data.nbytes] = data

    def read(self, region: Region, pieces: Sequence[Piece]) -> None:
        check_bounds(region.name, region.nbytes, pieces)
        mapped = self._map(region)
        source = memoryview(mapped)
        for offset, data in pieces:
            data[:] = source[offset : offset + data.nbytes]
        # What was read is the owner's memory: it does not stay in this process's page tables, up to all of it. All
        # of the mapping, as a fault brings in the pages around it, too.
        mapped.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        with self._lock:
            self._maps.clear()

    def _map(self, region: Region) -> mmap.mmap:
        with self._lock:
            known = self._maps.get(region.name)
            if known is not None:
                return known[1]
            mapped = map_region(region)
            for name, (other, _) in list(self._maps.items()):
                if not is_there(other):  # else memory that a peer has given up would stay for ever
                    del self._maps[name]
            self._maps[region.name] = (region, mapped)
            return mapped


def is_there(region: Region) -> bool:
    """Whether the process on this host that owns a region still offers it."""
    try:
        return str(Path(f"/proc/{region.pid}/fd/{region.fd}").readlink()).startswith(f"/memfd:{region.name}")
    except OSError:
        return False


def map_region(region: Region) -> mmap.mmap:
    """A region of a process on this host as memory of this one. Raises TransferError where it is gone."""
    fd = open_region(region)
    try:
        return mmap.mmap(fd, region.nbytes)
    except (OSError, ValueError) as error:
        raise TransferError(f"region {region.name} cannot be mapped: {error}") from error
    finally:
        os.close(fd)


def open_region(region: Region) -> int:
    """A file descriptor of the region of a process on this host. Raises TransferError where it is gone."""
    path = Path(f"/proc/{region.pid}/fd/{region.fd}")
    try:
        if not str(path.readlink()).startswith(f"/memfd:{region.name}"):
            raise TransferError(f"region {region.name} is gone: process {region.pid} has replaced it")
        return os.open(path, os.O_RDWR)
    except OSError as error:
        raise TransferError(f"region {region.name} of process {region.pid} cannot be opened: {error}") from error
