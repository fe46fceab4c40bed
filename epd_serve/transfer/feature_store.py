"""Feature stores: an encoder keeps its features there until the instances that need them have taken them."""

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

#: Larger features are copied and hashed on a thread; a smaller one takes less time than the switch is worth.
_INLINE_BYTES = 1 << 16


def checksum(data: bytes | bytearray | memoryview) -> str:
    """blake3 hex of a feature's bytes."""
    return blake3(data).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFeature:
    """The description of a feature stored under an mm_hash: shape, dtype and checksum.

    Attributes:
        offset: its place in the embedded store's slab, or on the device; None where it lies in another store.
        generation: of one on the device (:mod:`epd_serve.engine.device_features`); else 0.
        producer: of one that another encoder may have put; "": this one.
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
        memory: Region | None = None,
        store: str = "",
    ) -> FeatureEvent:
        """The hash event of a feature that lies in a region, or in a store of that name."""
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
            memory=memory,
            store=store,
        )


class StoreObserver(Protocol):
    """A callable that a store calls after each operation, on any thread. ``lost`` is a fetch that failed."""

    def __call__(
        self,
        store: Literal["embedded", "mooncake"],
        operation: Literal["hit", "miss", "put", "fetch", "evict", "lost"],
        nbytes: int = 0,
        seconds: float = 0.0,
        /,
    ) -> None: ...


def unobserved(*told: object) -> None:
    """Ignore the operation: the observer of a store that nobody measures."""


class FeatureStore(Protocol):
    """Features by mm_hash, stored once, evicted least recently used first.

    An owner (a request id) holds what it puts or acquires until it releases it; what is held is not evicted. The
    methods belong to one event loop, but for :meth:`fetch`, which any thread may call.

    Attributes:
        on_device: whether features are put and fetched as tensors of the instance's device, [nbytes] uint8.
    """

    on_device: bool

    @property
    def num_owners(self) -> int: ...

    @property
    def num_bytes(self) -> int:
        """Bytes of the features that this instance has put and that the store still holds."""
        ...

    async def acquire(self, mm_hash: str, owner: str) -> StoredFeature | None:
        """Hold a feature for ``owner`` until release; None where it must be encoded."""
        ...

    async def put(
        self, mm_hash: str, data: memoryview, shape: list[int], dtype: str, owner: str
    ) -> StoredFeature | None:
        """Store a feature and hold it for ``owner``; None where held features leave no room now.

        Raises ValueError for a feature larger than the store.
        """
        ...

    async def on_host(self, mm_hash: str, feature: StoredFeature, owner: str) -> StoredFeature | None:
        """A feature that the owner holds, in memory of the host; otherwise as :meth:`put`."""
        ...

    def release(self, owner: str, mm_hash: str) -> None:
        """Drop the owner's hold. Idempotent."""
        ...

    def event(self, mm_hash: str, feature: StoredFeature, request_id: str) -> FeatureEvent:
        """The hash event by which a consumer finds and verifies the feature."""
        ...

    def fetch(self, event: FeatureEvent) -> Any:
        """The bytes of an announced feature, verified: a bytearray, or a tensor of the device. Blocks.

        Any thread may call it. Raises TransferError where they cannot be had as they are described.
        """
        ...

    def close(self) -> None:
        """Give back what the store itself has taken. Blocks. Idempotent."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        ...


def verify_checksum(event: FeatureEvent, data: bytearray) -> None:
    """Raise TransferError unless the bytes are those that the event announced."""
    if checksum(data) != event.checksum:
        raise TransferError(f"feature {event.mm_hash[:12]} fails its checksum")


def read_feature(transport: Transport, event: FeatureEvent) -> bytearray:
    """Return the verified bytes of a feature in its encoder's memory. Raises TransferError."""
    if event.region is None:
        raise TransferError(
            f"feature {event.mm_hash[:12]} lies in {event.store}, which this instance does not use; "
            "instances need the same feature_store"
        )
    data = bytearray(event.nbytes)
    transport.read(event.region, [(event.offset, memoryview(data))])
    verify_checksum(event, data)
    return data


@contextmanager
def observed_fetch(
    observe: StoreObserver, store: Literal["embedded", "mooncake"], event: FeatureEvent
) -> Iterator[None]:
    """Tell the observer how the fetch inside went."""
    started = time.monotonic()
    try:
        yield
    except TransferError:
        observe(store, "lost")
        raise
    observe(store, "fetch", event.nbytes, time.monotonic() - started)


class FeatureBooks:
    """Where features lie in some memory, and who holds them: what all stores have in common. Not thread-safe.

    What nobody holds is evicted for others, the least recently used first.
    """

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
        """The feature, held for ``owner``; None where it is not here."""
        found = self._cache.acquire(mm_hash, owner)
        return None if found is None else found[1]

    def release(self, owner: str, mm_hash: str | None = None) -> None:
        """Drop a hold, or all of an owner. Idempotent."""
        self._cache.release(owner, mm_hash)

    def allocate(self, nbytes: int) -> int | None:
        """A place for a feature, for which others are evicted; None where what is held leaves no room."""
        while (offset := self._allocator.allocate(nbytes)) is None:
            evicted = self._cache.evict_one()
            if evicted is None:
                return None
            self._evict(*evicted)
        return offset

    def insert(self, mm_hash: str, feature: StoredFeature, owner: str) -> None:
        """Keep a feature that lies in its place, held for ``owner``."""
        for evicted in self._cache.put(mm_hash, (mm_hash, feature), feature.nbytes, owner):
            self._evict(*evicted)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
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
    """Features in one slab of a transport. A hold lasts as long as the call that announces the feature."""

    on_device = False

    def __init__(self, transport: Transport, capacity_bytes: int, observe: StoreObserver = unobserved) -> None:
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
        async with self._one_at_a_time:
            if mm_hash in self._cache:
                return self.hold(mm_hash, owner)
            started = time.monotonic()
            offset = self.allocate(data.nbytes)
            if offset is None:
                return None
            digest = await self._write(offset, data)
            feature = StoredFeature(offset=offset, nbytes=data.nbytes, shape=shape, dtype=dtype, checksum=digest)
            self.insert(mm_hash, feature, owner)
            self._observe("embedded", "put", data.nbytes, time.monotonic() - started)
            return feature

    async def on_host(self, mm_hash: str, feature: StoredFeature, owner: str) -> StoredFeature | None:
        return feature

    async def _write(self, offset: int, data: memoryview) -> str:
        """Copy a feature to its place; returns its checksum. What is cancelled gives the place back."""

        def write() -> str:
            self._slab.buffer[offset : offset + data.nbytes] = data
            return checksum(data)

        if data.nbytes <= _INLINE_BYTES:
            return write()
        writing = asyncio.get_running_loop().run_in_executor(self._thread, write)
        try:
            return await asyncio.shield(writing)
        except BaseException:
            writing.add_done_callback(lambda _: self._allocator.free(offset))  # not while it is written to
            raise

    def event(self, mm_hash: str, feature: StoredFeature, request_id: str) -> FeatureEvent:
        assert feature.offset is not None, "a feature of another store"
        return feature.event(mm_hash, request_id, region=self.region)

    def fetch(self, event: FeatureEvent) -> bytearray:
        if event.generation:
            raise NotMapped(f"feature {event.mm_hash[:12]} is on a device that this instance does not reach")
        with observed_fetch(self._observe, "embedded", event):
            return read_feature(self._transport, event)

    def close(self) -> None:
        """End the writes to the slab and release it."""
        self._thread.shutdown()
        self._transport.release(self._slab)

    def _evict(self, mm_hash: str, feature: StoredFeature) -> None:
        super()._evict(mm_hash, feature)
        self._observe("embedded", "evict", feature.nbytes)
