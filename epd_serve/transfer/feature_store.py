"""Where an encoder keeps its features until the instances that need them have taken them."""

from __future__ import annotations

from dataclasses import dataclass

from blake3 import blake3

from epd_serve.cache.feature_cache import FeatureCache
from epd_serve.protocol.wire import FeatureEvent
from epd_serve.transfer.slab_allocator import SlabAllocator
from epd_serve.transfer.transport import Transport


def checksum(data: bytes | bytearray | memoryview) -> str:
    """blake3 hex of a feature's bytes."""
    return blake3(data).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFeature:
    """A feature in the slab: its place, its look and its checksum."""

    offset: int
    nbytes: int
    shape: list[int]
    dtype: str
    checksum: str


class EmbeddedFeatureStore:
    """Features in one shared-memory slab, deduplicated by mm_hash, LRU by bytes. Not thread-safe.

    A hold (one per request and feature) lasts as long as the call that announces the feature.
    """

    def __init__(self, transport: Transport, capacity_bytes: int) -> None:
        self._slab = transport.allocate("features", capacity_bytes)
        self._allocator = SlabAllocator(capacity_bytes)
        self._cache: FeatureCache[StoredFeature] = FeatureCache(capacity_bytes)

    @property
    def num_owners(self) -> int:
        return self._cache.num_owners

    def acquire(self, mm_hash: str, owner: str) -> StoredFeature | None:
        """The feature, held for ``owner`` until release; None where it must be encoded."""
        return self._cache.acquire(mm_hash, owner)

    def put(
        self, mm_hash: str, data: memoryview, shape: list[int], dtype: str, owner: str
    ) -> StoredFeature | None:
        """Store a feature and hold it for ``owner``; None where held features leave no room now.

        Raises ValueError for a feature larger than the store.
        """
        if data.nbytes > self._allocator.capacity:
            raise ValueError(
                f"a feature of {data.nbytes} bytes does not fit a store of {self._allocator.capacity}; "
                "raise feature_store_bytes"
            )
        if mm_hash in self._cache:
            return self._cache.acquire(mm_hash, owner)
        offset = self._allocate(data.nbytes)
        if offset is None:
            return None
        self._slab.buffer[offset : offset + data.nbytes] = data
        feature = StoredFeature(
            offset=offset, nbytes=data.nbytes, shape=shape, dtype=dtype, checksum=checksum(data)
        )
        for evicted in self._cache.put(mm_hash, feature, data.nbytes, owner):
            self._allocator.free(evicted.offset)
        return feature

    def release(self, owner: str, mm_hash: str) -> None:
        """Drop the owner's hold. Idempotent."""
        self._cache.release(owner, mm_hash)

    def event(self, mm_hash: str, feature: StoredFeature, request_id: str) -> FeatureEvent:
        """The hash event by which a consumer finds and verifies the feature."""
        return FeatureEvent(
            request_id=request_id,
            mm_hash=mm_hash,
            shape=feature.shape,
            dtype=feature.dtype,
            nbytes=feature.nbytes,
            checksum=feature.checksum,
            region=self._slab.region,
            offset=feature.offset,
        )

    def check_integrity(self) -> None:
        self._cache.check_integrity()
        self._allocator.check_integrity()

    def _allocate(self, nbytes: int) -> int | None:
        while (offset := self._allocator.allocate(nbytes)) is None:
            evicted = self._cache.evict_one()
            if evicted is None:
                return None
            self._allocator.free(evicted.offset)
        return offset
