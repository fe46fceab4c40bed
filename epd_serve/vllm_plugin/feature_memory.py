"""Features in shared memory, by content hash, for the threads of one process."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from epd_serve.cache.feature_cache import FeatureCache
from epd_serve.protocol.wire import FeatureEvent, Region
from epd_serve.transfer.feature_store import checksum
from epd_serve.transfer.shared_memory import SlabAllocator
from epd_serve.transfer.transport import Transport


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptFeature:
    """A feature's place in the memory's region, and its form."""

    offset: int
    nbytes: int
    shape: list[int]
    dtype: str
    checksum: str


class FeatureMemory:
    """Least recently used features are evicted first; what an owner holds stays. Safe from any thread."""

    def __init__(self, transport: Transport, capacity_bytes: int) -> None:
        self._slab = transport.allocate("features", capacity_bytes)
        self._allocator = SlabAllocator(capacity_bytes)
        self._cache: FeatureCache[tuple[str, KeptFeature]] = FeatureCache(capacity_bytes)
        self._lock = threading.Lock()
        self._evicted: list[str] = []

    @property
    def region(self) -> Region:
        return self._slab.region

    def __contains__(self, mm_hash: str) -> bool:
        with self._lock:
            return mm_hash in self._cache

    def acquire(self, mm_hash: str, owner: str) -> KeptFeature | None:
        """The feature, held until :meth:`release`; None where it is not here."""
        with self._lock:
            found = self._cache.acquire(mm_hash, owner)
            return None if found is None else found[1]

    def put(
        self, mm_hash: str, data: memoryview, shape: list[int], dtype: str, owner: str, digest: str = ""
    ) -> KeptFeature | None:
        """Copy a feature in, held for ``owner``; None where held features leave no room, or it is larger than all.

        ``digest`` is its checksum where that is known.
        """
        digest = digest or checksum(data)
        with self._lock:
            if (found := self._cache.acquire(mm_hash, owner)) is not None:
                return found[1]
            offset = self._allocate(data.nbytes)
            if offset is None:
                return None
            self._slab.buffer[offset : offset + data.nbytes] = data
            kept = KeptFeature(offset=offset, nbytes=data.nbytes, shape=shape, dtype=dtype, checksum=digest)
            for other, evicted in self._cache.put(mm_hash, (mm_hash, kept), data.nbytes, owner):
                self._drop(other, evicted)
            return kept

    def release(self, owner: str, mm_hash: str | None = None) -> None:
        """Drop a hold, or all of an owner. Idempotent."""
        with self._lock:
            self._cache.release(owner, mm_hash)

    def take_evicted(self) -> list[str]:
        """Return the features evicted since the last call."""
        with self._lock:
            evicted, self._evicted = self._evicted, []
            return evicted

    def event(self, mm_hash: str, kept: KeptFeature, request_id: str) -> FeatureEvent:
        return FeatureEvent(
            request_id=request_id,
            mm_hash=mm_hash,
            shape=kept.shape,
            dtype=kept.dtype,
            nbytes=kept.nbytes,
            checksum=kept.checksum,
            region=self.region,
            offset=kept.offset,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        with self._lock:
            self._cache.check_integrity()
            self._allocator.check_integrity()

    def _allocate(self, nbytes: int) -> int | None:
        if nbytes > self._allocator.capacity:
            return None
        while (offset := self._allocator.allocate(nbytes)) is None or not self._cache.can_put(nbytes):
            if offset is not None:
                self._allocator.free(offset)
                return None
            evicted = self._cache.evict_one()
            if evicted is None:
                return None
            self._drop(*evicted)
        return offset

    def _drop(self, mm_hash: str, kept: KeptFeature) -> None:
        self._allocator.free(kept.offset)
        self._evicted.append(mm_hash)
