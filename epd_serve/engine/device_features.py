"""Features on the device: an encoder stores them in device memory; instances on its host copy them."""

from __future__ import annotations

import asyncio
import logging
import mmap
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from device.base import Device
from epd_serve.engine.device_memory import MappedMemory
from epd_serve.protocol.wire import FeatureEvent
from epd_serve.transfer.feature_store import (
    FeatureBooks,
    FeatureStore,
    StoredFeature,
    StoreObserver,
    drop_operation,
    observe_fetch,
)
from epd_serve.transfer.shared_memory import map_region, release_mapped
from epd_serve.transfer.transport import TransferError, Transport

logger = logging.getLogger(__name__)

#: Alignment of features; a table holds one generation per aligned slot.
SLOT_BYTES = 1 << 16
_GENERATION = struct.Struct("<Q")


class Copies:
    """Blocking copies of features to and from a device's memory, on a separate stream."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = device.stream()
        self._copying = threading.Lock()  # torch before 2.13 does not restore a second thread's stream

    def within(self, source: Tensor, target: Tensor | None = None) -> Tensor:
        """Copy memory to ``target``, by default to new device memory. Raises TransferError without room for it."""
        self._device.activate()
        try:
            with self._copying, self._stream:
                if target is None:
                    target = torch.empty(source.nbytes, dtype=torch.uint8, device=self._device.torch_device)
                target.copy_(source, non_blocking=True)
                done = self._device.record_event()
        except torch.OutOfMemoryError as error:
            raise TransferError(f"not enough memory for {source.nbytes} bytes of a feature: {error}") from error
        done.synchronize()
        return target

    def to_host(self, source: Tensor) -> memoryview:
        view: memoryview = self.within(source, torch.empty(source.nbytes, dtype=torch.uint8)).numpy().data
        return view

    def to_device(self, data: bytearray) -> Tensor:
        return self.within(torch.frombuffer(data, dtype=torch.uint8))


class DeviceFeatureStore:
    """Feature store of device tensors on top of a host store.

    An encoder keeps features in one area of device memory, which consumers on its host map once. The host store
    serves consumers that cannot map it, and instances that encode only as a fallback.

    Args:
        capacity_bytes: size of the area; 0: no area.
    """

    on_device = True

    def __init__(
        self,
        device: Device,
        transport: Transport,
        host: FeatureStore,
        capacity_bytes: int,
        observe: StoreObserver = drop_operation,
    ) -> None:
        self._host, self._transport, self._observe = host, transport, observe
        self._copies = Copies(device)
        self._mapped = MappedMemory(device)
        self._one_at_a_time = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="device-store")
        self._area: FeatureArea | None = None
        if capacity_bytes:
            area = FeatureArea(device, transport, capacity_bytes, observe)
            if area.region.handle:
                self._area = area
            else:  # consumers could not map it
                release_mapped(transport, area.slab)

    @property
    def num_owners(self) -> int:
        return self._host.num_owners + (self._area.num_owners if self._area else 0)

    @property
    def num_bytes(self) -> int:
        return self._host.num_bytes + (self._area.num_bytes if self._area else 0)

    async def acquire(self, mm_hash: str, owner: str) -> StoredFeature | None:
        if self._area is None or (feature := self._area.hold(mm_hash, owner)) is None:
            return await self._host.acquire(mm_hash, owner)
        self._observe("embedded", "hit")
        return feature

    async def put(self, mm_hash: str, data: Any, shape: list[int], dtype: str, owner: str) -> StoredFeature | None:
        """Store a feature; ``data``: a device tensor, [nbytes] uint8."""
        area = self._area
        if area is None:
            there = await self._in_thread(self._copies.to_host, data)
            return await self._host.put(mm_hash, there, shape, dtype, owner)
        if data.nbytes > area.nbytes:
            raise ValueError(
                f"a feature of {data.nbytes} bytes does not fit a store of {area.nbytes}; "
                "raise feature_cache_bytes"
            )
        async with self._one_at_a_time:
            if (found := area.hold(mm_hash, owner)) is not None:
                return found
            started = time.monotonic()
            if (offset := area.allocate(data.nbytes)) is None:
                return None
            writing = self._in_thread(self._copies.within, data, area.features.part(offset, data.nbytes))
            try:
                await asyncio.shield(writing)
            except BaseException:
                writing.add_done_callback(lambda _: area.give_back(offset))  # only after the write
                raise
            feature = area.publish(mm_hash, offset, data.nbytes, shape, dtype, owner)
            self._observe("embedded", "put", data.nbytes, time.monotonic() - started)
            return feature

    async def on_host(self, mm_hash: str, feature: StoredFeature, owner: str) -> StoredFeature | None:
        if self._area is None or not feature.generation:
            return feature
        async with self._one_at_a_time:
            if (found := await self._host.acquire(mm_hash, owner)) is not None:
                return found
            assert feature.offset is not None
            data = await self._in_thread(
                self._copies.to_host, self._area.features.part(feature.offset, feature.nbytes)
            )
            return await self._host.put(mm_hash, data, feature.shape, feature.dtype, owner)

    def release(self, owner: str, mm_hash: str) -> None:
        if self._area is not None:
            self._area.release(owner, mm_hash)
        self._host.release(owner, mm_hash)

    def event(self, mm_hash: str, feature: StoredFeature, request_id: str) -> FeatureEvent:
        if self._area is None or not feature.generation:
            return self._host.event(mm_hash, feature, request_id)
        return feature.event(mm_hash, request_id, region=self._area.region)

    def fetch(self, event: FeatureEvent) -> Tensor:
        """Return a copy of the feature, [nbytes] uint8, on this device."""
        if not event.generation or event.region is None:
            return self._copies.to_device(self._host.fetch(event))
        with observe_fetch(self._observe, "embedded", event):
            if self._area is not None and event.region.name == self._area.region.name:
                return self._area.features.copied(event, self._copies)
            with self._mapped.reading(event.region) as memory:
                return GuardedMemory(memory, map_region(event.region)).copied(event, self._copies)

    def close(self) -> None:
        """Finish the copies and wait until no process maps the area."""
        self._thread.shutdown()
        self._mapped.close()
        area, self._area = self._area, None
        if area is not None:
            release_mapped(self._transport, area.slab)
        self._host.close()

    def check_integrity(self) -> None:
        self._host.check_integrity()
        if self._area is not None:
            self._area.check_integrity()

    def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)


@dataclass(eq=False, slots=True)
class GuardedMemory:
    """Features in device memory, guarded by a table of generations in host memory.

    A generation is a number unique to a feature within the area. The table holds it from the time the feature is
    complete until its place may be reused. A reader checks it after copying: if it is still there, the copy is
    valid without hashing any bytes.
    """

    memory: Tensor
    table: memoryview | mmap.mmap

    def part(self, offset: int, nbytes: int) -> Tensor:
        return self.memory[offset : offset + nbytes]

    def mark(self, offset: int, generation: int) -> None:
        _GENERATION.pack_into(self.table, offset // SLOT_BYTES * _GENERATION.size, generation)

    def copied(self, event: FeatureEvent, copies: Copies) -> Tensor:
        """Return a copy of a feature. Raises TransferError if it was evicted or memory is full."""
        if event.offset < 0 or event.offset % SLOT_BYTES or event.offset + event.nbytes > len(self.memory):
            raise TransferError(f"feature {event.mm_hash[:12]} is outside its store")
        copy = copies.within(self.part(event.offset, event.nbytes))
        place = event.offset // SLOT_BYTES * _GENERATION.size
        if _GENERATION.unpack_from(self.table, place) != (event.generation,):
            raise TransferError(f"feature {event.mm_hash[:12]} was evicted by its encoder")
        return copy


class FeatureArea(FeatureBooks):
    """Features kept by an encoder.

    Attributes:
        slab, region: the table of generations, and its region with the handle by which other processes of the host
            map the memory; an empty handle if they cannot.
    """

    def __init__(self, device: Device, transport: Transport, nbytes: int, observe: StoreObserver) -> None:
        nbytes = max(nbytes // SLOT_BYTES, 1) * SLOT_BYTES
        super().__init__(nbytes, SLOT_BYTES)
        memory, handle = device.share_memory(nbytes)
        self.slab = transport.allocate("generations", nbytes // SLOT_BYTES * _GENERATION.size)
        self.features = GuardedMemory(memory, self.slab.buffer)
        self.region = msgspec.structs.replace(self.slab.region, device=device.type, handle=handle)
        self._observe = observe
        self._num_features = 0

    def publish(
        self, mm_hash: str, offset: int, nbytes: int, shape: list[int], dtype: str, owner: str
    ) -> StoredFeature:
        """Publish a feature copied to its place, and hold it for ``owner``."""
        self._num_features += 1
        feature = StoredFeature(
            nbytes=nbytes, shape=shape, dtype=dtype, checksum="", offset=offset, generation=self._num_features
        )
        self.features.mark(offset, feature.generation)
        self.insert(mm_hash, feature, owner)
        return feature

    def give_back(self, offset: int) -> None:
        """Free a place before a feature is published there."""
        self._allocator.free(offset)

    def _evict(self, mm_hash: str, feature: StoredFeature) -> None:
        assert feature.offset is not None
        self.features.mark(feature.offset, 0)  # before its place is reused
        super()._evict(mm_hash, feature)
        self._observe("embedded", "evict", feature.nbytes)
