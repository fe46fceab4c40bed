"""Shared memory slabs, an allocator of ranges in them, and locks of peers that map device memory.

A slab is an anonymous memfd that peers map through ``/proc/<pid>/fd/<fd>``. The kernel frees it with the last
mapping, so even SIGKILL leaves nothing in ``/dev/shm``.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
import threading
import time
import uuid
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from epd_serve.protocol.wire import Region
from epd_serve.transfer.transport import HostPiece, Slab, TransferError, Transport, check_bounds

# Linux constants, the same on every architecture, that the mmap module lacks.
_MAP_FIXED = 0x10
_PROT_NONE = 0


@cache
def host_id() -> str:
    """Return an id of this kernel and pid namespace, equal for processes that can map each other's memory."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{Path('/proc/self/ns/pid').readlink()}"


class SharedSlab:
    """Zeroed memory of this process that peers on the same host can map.

    Args:
        alignment: alignment of the memory's address, a power of two.

    Raises ValueError if the memory cannot be allocated.
    """

    def __init__(self, name: str, nbytes: int, *, host: str = "", port: int = 0, alignment: int = 1) -> None:
        self._name = f"{name}-{uuid.uuid4().hex}"  # unique, in case pid and fd are reused
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
                f"cannot allocate {nbytes >> 20} MiB for {name!r} ({error.strerror}): use less (num_blocks, "
                "feature_cache_bytes) or raise the memory limit (ulimit -v, cgroup)"
            ) from error
        self.region = Region(
            name=self._name, nbytes=nbytes, host_id=host_id(), pid=os.getpid(), fd=self._fd, host=host, port=port
        )

    def close(self) -> None:
        """Close the descriptor; the memory lives until its last view is gone."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _map_aligned(fd: int, nbytes: int, alignment: int) -> memoryview:
    """Map ``fd`` at a multiple of ``alignment``; the mapping is freed with its last view."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    def mapped(address: int | None, size: int, protection: int, flags: int, file: int) -> int:
        result: int = libc.mmap(address, size, protection, flags, file, 0)
        if result == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), f"mmap of {size} bytes")
        return result

    # reserve room for an aligned start, then map the file over part of it
    reserved = nbytes + alignment
    start = mapped(None, reserved, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    address = -(-start // alignment) * alignment
    mapped(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
    memory = (ctypes.c_char * nbytes).from_address(address)
    weakref.finalize(memory, libc.munmap, start, reserved).atexit = False
    return memoryview(memory).cast("B")


#: Time after which the mapping of a peer that is gone is noticed.
_LOOK_S = 1.0


class SharedMemoryPeers:
    """Reads regions of other processes on this host through cached mappings.

    A mapping keeps the memory of a dead peer alive, so a thread drops those whose owner no longer offers them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._maps: dict[str, tuple[Region, mmap.mmap]] = {}
        self._watch: threading.Thread | None = None
        self._closing = threading.Event()

    def read(self, region: Region, pieces: Sequence[HostPiece]) -> None:
        check_bounds(region, pieces)
        _, mapped = self._maps.get(region.name) or self._map(region)
        source = memoryview(mapped)
        for offset, data in pieces:
            data[:] = source[offset : offset + data.nbytes]
        # Or the owner's memory would also count as this process's. A page fault maps the pages around it, too.
        mapped.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        self._closing.set()
        with self._lock:
            self._maps.clear()

    def _map(self, region: Region) -> tuple[Region, mmap.mmap]:
        with self._lock:
            if region.name not in self._maps:
                self._maps[region.name] = region, map_region(region)
            if self._watch is None:
                self._watch = threading.Thread(target=self._unmap_gone, name="mapped-peers", daemon=True)
                self._watch.start()
            return self._maps[region.name]

    def _unmap_gone(self) -> None:
        while not self._closing.wait(_LOOK_S):
            with self._lock:
                for name in [name for name, one in self._maps.items() if not is_offered(one[0])]:
                    del self._maps[name]


def is_offered(region: Region) -> bool:
    """Return whether the region's owner, a process on this host, still offers it."""
    try:
        return str(Path(f"/proc/{region.pid}/fd/{region.fd}").readlink()).startswith(f"/memfd:{region.name}")
    except OSError:
        return False


def map_region(region: Region) -> mmap.mmap:
    """Map a region of this host for reading. Raises TransferError if it is gone."""
    fd = open_region(region)
    try:
        return mmap.mmap(fd, region.nbytes, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise TransferError(f"region {region.name} cannot be mapped: {error}") from error
    finally:
        os.close(fd)


def open_region(region: Region) -> int:
    """Open the memfd of a region of this host. Raises TransferError if it is gone."""
    path = Path(f"/proc/{region.pid}/fd/{region.fd}")
    try:
        if not str(path.readlink()).startswith(f"/memfd:{region.name}"):
            raise TransferError(f"region {region.name} of process {region.pid} is gone")
        return os.open(path, os.O_RDONLY)
    except OSError as error:
        raise TransferError(f"region {region.name} of process {region.pid} cannot be opened: {error}") from error


#: struct flock of 64-bit Linux: type, whence, start, length, pid (0 for these locks).
_FLOCK = struct.Struct("@hhqqi4x")
#: Time within which peers unmap released memory.
UNMAP_S = 0.25
_UNMAP_TIMEOUT_S = 5.0


@contextmanager
def mapping_lock(region: Region) -> Iterator[None]:
    """Hold the lock that shows the owner of ``region`` that this process maps its device memory.

    It is an open-file-description lock (fcntl(2)) on the region's memfd, which the kernel drops when the process
    ends. Raises TransferError if the owner is gone.
    """
    fd = open_region(region)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 1, 0))
        yield
    finally:
        os.close(fd)


def release_mapped(transport: Transport, slab: Slab) -> None:
    """Release a slab and wait until no process maps the device memory offered with it."""
    fd = os.dup(slab.region.fd)
    lock = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    try:
        transport.release(slab)
        deadline = time.monotonic() + _UNMAP_TIMEOUT_S
        while time.monotonic() < deadline:  # a stopped process may hold its lock longer
            if _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, lock))[0] == fcntl.F_UNLCK:
                return
            time.sleep(UNMAP_S / 10)
    finally:
        os.close(fd)


class SlabAllocator:
    """Allocates aligned ranges of ``capacity`` bytes, which is rounded down to the alignment."""

    def __init__(self, capacity: int, alignment: int = 64) -> None:
        self.capacity = capacity // alignment * alignment
        self._alignment = alignment
        self._holes: dict[int, int] = {0: self.capacity} if self.capacity else {}  # sizes by offset
        self.used: dict[int, int] = {}

    def allocate(self, nbytes: int) -> int | None:
        """Return the offset of a free range of at least ``nbytes``; None if no hole is large enough."""
        size = -(-max(nbytes, 1) // self._alignment) * self._alignment
        fitting = [(hole, offset) for offset, hole in self._holes.items() if hole >= size]
        if not fitting:
            return None
        hole, offset = min(fitting)
        del self._holes[offset]
        if hole > size:
            self._holes[offset + size] = hole - size
        self.used[offset] = size
        return offset

    def free(self, offset: int) -> None:
        size = self.used.pop(offset)
        size += self._holes.pop(offset + size, 0)
        before = next((start for start, hole in self._holes.items() if start + hole == offset), None)
        if before is not None:
            size, offset = size + self._holes[before], before
        self._holes[offset] = size

    def check_integrity(self) -> None:
        """Raise AssertionError unless used ranges and merged holes cover the slab exactly."""
        ranges = sorted([*self.used.items(), *self._holes.items()])
        position = 0
        for offset, size in ranges:
            assert offset == position, f"gap or overlap at {position}"
            position = offset + size
        assert position == self.capacity, "the end of the slab is missing"
        ends = {offset + size for offset, size in self._holes.items()}
        assert ends.isdisjoint(self._holes), "neighbouring holes were not merged"
