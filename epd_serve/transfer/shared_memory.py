"""Shared memory on one host that no crash can leak, ranges of it, and locks of those that map a device's memory.

A slab is an anonymous memfd; peers map it through ``/proc/<pid>/fd/<fd>``. The kernel frees it with the last
process that maps it, so nothing stays behind in ``/dev/shm`` even after SIGKILL.
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
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from epd_serve.protocol.wire import Region
from epd_serve.transfer.transport import HostPiece, Slab, TransferError, Transport, check_bounds

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
                "(num_blocks, feature_cache_bytes), or raise the limit of memory (ulimit -v, the cgroup's)"
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
    """Reads regions of other processes on this host through mappings that are made once and kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of those who map
        self._maps: dict[str, tuple[Region, mmap.mmap]] = {}

    def read(self, region: Region, pieces: Sequence[HostPiece]) -> None:
        check_bounds(region, pieces)
        _, mapped = self._maps.get(region.name) or self._map(region)
        source = memoryview(mapped)
        for offset, data in pieces:
            data[:] = source[offset : offset + data.nbytes]
        # What was read is the owner's memory: it does not stay in this process's page tables, up to all of it. All
        # of the mapping, as a fault brings in the pages around it, too.
        mapped.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        with self._lock:
            self._maps.clear()

    def _map(self, region: Region) -> tuple[Region, mmap.mmap]:
        with self._lock:
            if region.name not in self._maps:
                mapped = map_region(region)
                # else memory that a peer has given up would stay for ever
                self._maps = {name: one for name, one in self._maps.items() if is_there(one[0])}
                self._maps[region.name] = region, mapped
            return self._maps[region.name]


def is_there(region: Region) -> bool:
    """Whether the process on this host that owns a region still offers it."""
    try:
        return str(Path(f"/proc/{region.pid}/fd/{region.fd}").readlink()).startswith(f"/memfd:{region.name}")
    except OSError:
        return False


def map_region(region: Region) -> mmap.mmap:
    """Map a region of a process on this host, to be read. Raises TransferError where it is gone."""
    fd = open_region(region)
    try:
        return mmap.mmap(fd, region.nbytes, access=mmap.ACCESS_READ)
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
        return os.open(path, os.O_RDONLY)
    except OSError as error:
        raise TransferError(f"region {region.name} of process {region.pid} cannot be opened: {error}") from error


#: struct flock of 64-bit Linux: type, whence, start, length, pid (0 for these locks).
_FLOCK = struct.Struct("@hhqqi4x")


#: Mappings of memory that its owner has given up are ended within this time.
UNMAP_S = 0.25
_UNMAP_TIMEOUT_S = 5.0


@contextmanager
def mapping_lock(region: Region) -> Iterator[None]:
    """Hold the lock by which the owner of ``region`` sees that a process of this host maps the device's memory.

    It is an open-file-description lock (fcntl(2)) on the region's memfd: the kernel takes it from a process that
    ends. Raises TransferError where the owner is gone.
    """
    fd = open_region(region)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 1, 0))
        yield
    finally:
        os.close(fd)


def release_mapped(transport: Transport, slab: Slab) -> None:
    """Release a slab, and wait until no process maps the device's memory that was offered with it."""
    fd = os.dup(slab.region.fd)
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    try:
        transport.release(slab)
        deadline = time.monotonic() + _UNMAP_TIMEOUT_S
        while time.monotonic() < deadline:  # a stopped process keeps it
            if _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))[0] == fcntl.F_UNLCK:
                return
            time.sleep(UNMAP_S / 10)
    finally:
        os.close(fd)


class SlabAllocator:
    """Hands out aligned, non-overlapping ``[offset, offset + nbytes)`` ranges of ``capacity`` bytes.

    ``capacity`` is rounded down to the alignment, so that whatever is no larger fits when all else is free.
    """

    def __init__(self, capacity: int, alignment: int = 64) -> None:
        self.capacity = capacity // alignment * alignment
        self._alignment = alignment
        self._free_by_offset: dict[int, int] = {0: self.capacity}
        self._offsets = [0]
        self._used: dict[int, int] = {}

    @property
    def num_used(self) -> int:
        """Ranges that are handed out."""
        return len(self._used)

    def allocate(self, nbytes: int) -> int | None:
        """Offset of a free range of at least ``nbytes``; None where no single hole is large enough."""
        size = -(-max(nbytes, 1) // self._alignment) * self._alignment
        holes = [(hole, offset) for offset, hole in self._free_by_offset.items() if hole >= size]
        if not holes:
            return None
        hole, offset = min(holes)
        self._remove_hole(offset)
        if hole > size:
            self._add_hole(offset + size, hole - size)
        self._used[offset] = size
        return offset

    def free(self, offset: int) -> None:
        size = self._used.pop(offset)
        index = bisect_left(self._offsets, offset)
        if index < len(self._offsets) and self._offsets[index] == offset + size:
            size += self._remove_hole(offset + size)
        if index > 0:
            before = self._offsets[index - 1]
            if before + self._free_by_offset[before] == offset:
                size += self._remove_hole(before)
                offset = before
        self._add_hole(offset, size)

    def check_integrity(self) -> None:
        """Raise AssertionError unless used ranges and merged holes tile the slab exactly."""
        ranges = sorted([*self._used.items(), *self._free_by_offset.items()])
        position = 0
        for offset, size in ranges:
            assert offset == position, f"gap or overlap at {position}"
            position = offset + size
        assert position == self.capacity, "the slab is not covered"
        assert sorted(self._free_by_offset) == self._offsets, "the index of holes is stale"
        for left, right in zip(self._offsets, self._offsets[1:], strict=False):
            assert left + self._free_by_offset[left] < right, "neighbouring holes were not merged"

    def _add_hole(self, offset: int, size: int) -> None:
        self._free_by_offset[offset] = size
        insort(self._offsets, offset)

    def _remove_hole(self, offset: int) -> int:
        del self._offsets[bisect_left(self._offsets, offset)]
        return self._free_by_offset.pop(offset)
