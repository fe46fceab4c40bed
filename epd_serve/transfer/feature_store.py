"""Feature stores, which keep an encoder's features until the prefill instances have fetched them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from blake3 import blake3

from epd_serve.cache.feature_cache import FeatureCache
from epd_serve.protocol.wire import FeatureEvent, Region
from epd_serve.transfer.shared_memory import SlabAllocator
from epd_serve.transfer.transport import NotMapped, TransferError, Transport

#: Larger features are copied and hashed on a thread; for smaller ones the switch takes longer.
_INLINE_BYTES = 1 << 16


def checksum(data: bytes | bytearray | memoryview) -> str:
    """Return the blake3 hex digest of a feature's bytes."""
    return blake3(data).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFeature:
    """The description of a stored feature.

    Attributes:
        offset: in the embedded store's slab or on the device; None in another store.
        generation: generation of a feature on the device (:mod:`epd_serve.engine.device_features`); else 0.
        producer: the encoder that put it in a shared store; "" for this one.
    """

    nbytes: int
    shape: list[int]
    dtype: str
    checksum: str
    offset: int | None = None
    generation: int = 0
    producer: str = ""

    def event(
        self,
        mm_hash: str,
        request_id: str,
        *,
        region: Region | None = None,
        store: str = "",
    ) -> FeatureEvent:
        """Return the hash event of the feature, in a region or in a named store."""
        return FeatureEvent(
            request_id=request_id,
            mm_hash=mm_hash,
            shape=self.shape,
            dtype=self.dtype,
            nbytes=self.nbytes,
            checksum=self.checksum,
            region=region,
            offset=self.offset or 0,
            generation=self.generation,
            store=store,
        )


class StoreObserver(Protocol):
    """Called by a store after each operation, on any thread. ``lost`` is a failed fetch."""

    def __call__(
        self,
        store: Literal["embedded", "mooncake"],
        operation: Literal["hit", "miss", "put", "fetch", "evict", "lost"],
        nbytes: int = 0,
        seconds: float = 0.0,
        /,
    ) -> None: ...


def drop_operation(*operation: object) -> None:
    """Ignore an operation: the default observer."""


class FeatureStore(Protocol):
    """Features by mm_hash, stored once, evicted least recently used first.

    An owner (a request id) holds a feature from put or acquire until release; held features are not evicted. In a
    store of several instances a lease of some seconds takes the place of a hold.
    Methods run on one event loop, except :meth:`fetch`.

    Attributes:
        on_device: whether features are put and fetched as device tensors, [nbytes] uint8.
    """

    on_device: bool

    @property
    def num_owners(self) -> int: ...

    @property
    def num_bytes(self) -> int:
        """Bytes of the features in this instance's own memory."""
        ...

    async def acquire(self, mm_hash: str, owner: str) -> StoredFeature | None:
        """Hold a feature for ``owner``; return None if it must be encoded."""
        ...

    async def put(
        self, mm_hash: str, data: memoryview, shape: list[int], dtype: str, owner: str
    ) -> StoredFeature | None:
        """Store a feature and hold it for ``owner``; return None if held features fill the store.

        Raises ValueError for a feature larger than the store.
        """
        ...

    async def on_host(self, mm_hash: str, feature: StoredFeature, owner: str) -> StoredFeature | None:
        """Return a held feature in host memory; return values as of :meth:`put`."""
        ...

    def release(self, owner: str, mm_hash: str) -> None:
        """Drop the owner's hold. Idempotent."""
        ...

    def event(self, mm_hash: str, feature: StoredFeature, request_id: str) -> FeatureEvent:
        """Return the hash event by which a consumer finds and verifies the feature."""
        ...

    def fetch(self, event: FeatureEvent) -> Any:
        """Return the verified bytes of an announced feature, a bytearray or a device tensor.

        Blocks; any thread may call it. Raises TransferError.
        """
        ...

    def close(self) -> None:
        """Free the store's memory and threads. Blocks. Idempotent."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent."""
        ...


def verify_checksum(event: FeatureEvent, data: bytearray) -> None:
    """Raise TransferError unless the bytes match the event's checksum."""
    if checksum(data) != event.checksum:
        raise TransferError(f"feature {event.mm_hash[:12]} fails its checksum")


def read_feature(transport: Transport, event: FeatureEvent) -> bytearray:
    """Return the verified bytes of a feature in its encoder's memory. Raises TransferError."""
    if event.region is None:
        raise TransferError(
            f"feature {event.mm_hash[:12]} is in {event.store}, which this instance does not use; "
            "instances need the same feature_store"
        )
    data = bytearray(event.nbytes)
    transport.read(event.region, [(event.offset, memoryview(data))])
    verify_checksum(event, data)
    return data


@contextmanager
def observe_fetch(
    observe: StoreObserver, store: Literal["embedded", "mooncake"], event: FeatureEvent
) -> Iterator[None]:
    """Report the fetch within the context to the observer."""
    started = time.monotonic()
    try:
        yield
    except TransferError:
        observe(store, "lost")
        raise
    observe(store, "fetch", event.nbytes, time.monotonic() - started)


class FeatureBooks:
    """Bookkeeping common to all stores: offsets of features in some memory, and their owners. Not thread-safe."""

    def __init__(self, capacity_bytes: int, alignment: int = 64) -> None:
        self._allocator = SlabAllocator(capacity_bytes, alignment)
        self._cache: FeatureCache[tuple[str, StoredFeature]] = FeatureCache(capacity_bytes)

    @property
    def nbytes(self) -> int:
        return self._allocator.capacity

    @property
    def num_owners(self) -> int:
        return self._cache.num_owners

    @property
    def num_bytes(self) -> int:
        return self._cache.num_bytes

    def hold(self, mm_hash: str, owner: str) -> StoredFeature | None:
        """Hold a feature for ``owner`` and return it; None if it is not stored."""
        found = self._cache.acquire(mm_hash, owner)
        return None if found is None else found[1]

    def release(self, owner: str, mm_hash: str | None = None) -> None:
        """Drop an owner's hold, by default all of its holds. Idempotent."""
        self._cache.release(owner, mm_hash)

    def allocate(self, nbytes: int) -> int | None:
        """Return an offset for a feature, evicting others; None if held features leave no room."""
        while (offset := self._allocator.allocate(nbytes)) is None:
            evicted = self._cache.evict_one()
            if evicted is None:
                return None
            self._evict(*evicted)
        return offset

    def insert(self, mm_hash: str, feature: StoredFeature, owner: str) -> None:
        """Add a feature that lies at its offset, held for ``owner``."""
        for evicted in self._cache.put(mm_hash, (mm_hash, feature), feature.nbytes, owner):
            self._evict(*evicted)

    def check_integrity(self) -> None:
        self._cache.check_integrity()
        self._allocator.check_integrity()

    def _evict(self, mm_hash: str, feature: StoredFeature) -> None:
        assert feature.offset is not None, "a feature of another store"
        self._allocator.free(feature.offset)


class FeatureSlab(FeatureBooks):
    """Features in one slab of a transport."""

    def __init__(self, transport: Transport, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._transport = transport
        self._slab = transport.allocate("features", capacity_bytes)
        self.region: Region = self._slab.region


class EmbeddedFeatureStore(FeatureSlab):
    """Features in one slab of a transport, held during the call that announces them."""

    on_device = False

    def __init__(self, transport: Transport, capacity_bytes: int, observe: StoreObserver = drop_operation) -> None:
        super().__init__(transport, capacity_bytes)
        self._observe = observe
        self._one_at_a_time = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")

    async def acquire(self, mm_hash: str, owner: str) -> StoredFeature | None:
        feature = self.hold(mm_hash, owner)
        self._observe("embedded", "miss" if feature is None else "hit")
        return feature

    async def put(
        self, mm_hash: str, data: memoryview, shape: list[int], dtype: str, owner: str
    ) -> StoredFeature | None:
        if data.nbytes > self.nbytes:
            raise ValueError(
                f"a feature of {data.nbytes} bytes does not fit a store of {self.nbytes}; "
                "raise feature_cache_bytes"
            )

        def write(offset: int) -> str:
            self._slab.buffer[offset : offset + data.nbytes] = data
            return checksum(data)

        async with self._one_at_a_time:
            if mm_hash in self._cache:
                return self.hold(mm_hash, owner)
            started = time.monotonic()
            offset = self.allocate(data.nbytes)
            if offset is None:
                return None
            if data.nbytes <= _INLINE_BYTES:
                digest = write(offset)
            else:
                writing = asyncio.get_running_loop().run_in_executor(self._thread, write, offset)
                try:
                    digest = await asyncio.shield(writing)
                except BaseException:
                    writing.add_done_callback(lambda _: self._allocator.free(offset))  # after the write
                    raise
            feature = StoredFeature(offset=offset, nbytes=data.nbytes, shape=shape, dtype=dtype, checksum=digest)
            self.insert(mm_hash, feature, owner)
            self._observe("embedded", "put", data.nbytes, time.monotonic() - started)
            return feature

    async def on_host(self, mm_hash: str, feature: StoredFeature, owner: str) -> StoredFeature | None:
        return feature

    def event(self, mm_hash: str, feature: StoredFeature, request_id: str) -> FeatureEvent:
        assert feature.offset is not None, "a feature of another store"
        return feature.event(mm_hash, request_id, region=self.region)

    def fetch(self, event: FeatureEvent) -> bytearray:
        if event.generation:
            raise NotMapped(f"feature {event.mm_hash[:12]} is on a device that this instance cannot reach")
        with observe_fetch(self._observe, "embedded", event):
            return read_feature(self._transport, event)

    def close(self) -> None:
        """Wait for pending writes and release the slab."""
        self._thread.shutdown()
        self._transport.release(self._slab)

    def _evict(self, mm_hash: str, feature: StoredFeature) -> None:
        super()._evict(mm_hash, feature)
        self._observe("embedded", "evict", feature.nbytes)
