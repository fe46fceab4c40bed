"""The feature store over Mooncake Store: each feature is put once, and every instance finds it by mm_hash."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from typing import TypeVar, TypeVarTuple, Unpack

import msgspec

from epd_serve.cache.feature_cache import FeatureCache
from epd_serve.protocol.wire import FeatureEvent, Message
from epd_serve.transfer.feature_store import (
    EmbeddedFeatureStore,
    StoredFeature,
    StoreObserver,
    checksum,
    drop_operation,
    observe_fetch,
    verify_checksum,
)
from epd_serve.transfer.mooncake.engine import MooncakeOptions, Staged, StagingPool, StoreClient, StoreUnreachable
from epd_serve.transfer.transport import TransferError

logger = logging.getLogger(__name__)

STORE = "mooncake"
#: An object is a feature's bytes and a trailer of this size, which holds a length and a _Description.
_TRAILER_BYTES = 512
_LENGTH_BYTES = 4
_NUM_THREADS = 16
_NUM_FETCHES = 16
_READ_TRIES = 25
_READ_RETRY_S = 0.02
_EVICTOR = ""  # an owner without a request

_T = TypeVar("_T")
_Arguments = TypeVarTuple("_Arguments")


class _Description(Message, frozen=True):
    shape: list[int]
    dtype: str
    checksum: str
    origin: str
    producer: str = ""


class MooncakeFeatureStore:
    """A :class:`epd_serve.transfer.feature_store.FeatureStore` over all instances that share a master.

    An instance puts features into its own segment, pinned, and removes them itself, least recently used first. A
    feature put by another instance is announced as stored; looking it up leases it for some seconds. A feature
    that the store refuses, or while its master is down, goes into ``local``: no answer depends on the store.

    Args:
        local: store for refused features, and for all features if this instance lends no segment.
        capacity_bytes: size of the segment.
        producer: name of this instance in its features.
    """

    on_device = False

    def __init__(
        self,
        client: StoreClient,
        local: EmbeddedFeatureStore,
        capacity_bytes: int,
        options: MooncakeOptions,
        observe: StoreObserver = drop_operation,
        producer: str = "",
    ) -> None:
        self._client = client
        self._producer = producer
        self._origin = uuid.uuid4().hex
        self._observe = observe
        self._local = local
        self._capacity = capacity_bytes
        self._timeout_s = options.timeout_s
        self._cache: FeatureCache[str] = FeatureCache(capacity_bytes)  # put by this instance
        self._leased: FeatureCache[str] = FeatureCache(0)  # evicted, but perhaps still stored under a lease
        self._pool = StagingPool(options.staging_bytes, max(options.alignment_bytes, 64))
        client.register(self._pool.address, self._pool.nbytes)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="store")
        # Mooncake waits a minute for the first answer of a hung process. We wait only for our timeout, and have
        # enough threads for other calls.
        self._fetching = ThreadPoolExecutor(_NUM_FETCHES, thread_name_prefix="store-fetch")
        self._one_at_a_time = asyncio.Lock()

    @property
    def num_owners(self) -> int:
        return self._cache.num_owners + self._leased.num_owners + self._local.num_owners

    @property
    def num_bytes(self) -> int:
        return self._cache.num_bytes + self._local.num_bytes

    async def acquire(self, mm_hash: str, owner: str) -> StoredFeature | None:
        local = self._local.hold(mm_hash, owner)
        if local is not None:
            self._observe("embedded", "hit")
            return local
        try:
            found = await self._acquire_stored(mm_hash, owner)
        except TransferError:
            found = None
        self._observe("mooncake", "miss" if found is None else "hit")
        return found

    async def put(
        self, mm_hash: str, data: memoryview, shape: list[int], dtype: str, owner: str
    ) -> StoredFeature | None:
        if self._client.has_segment and data.nbytes + _TRAILER_BYTES <= min(self._capacity, self._pool.nbytes):
            # a task of its own, so that a finished put is recorded even after cancellation
            task = asyncio.create_task(self._put(mm_hash, data, shape, dtype, owner))
            try:
                feature = await asyncio.wait_for(asyncio.shield(task), self._timeout_s)
            except TimeoutError:  # a segment's owner hangs, for this put or for one before it
                feature = None
            finally:
                if not task.done():
                    task.add_done_callback(lambda _: self._unhold(mm_hash, owner))
            if feature is not None:
                return feature
        return await self._local.put(mm_hash, data, shape, dtype, owner)

    async def on_host(self, mm_hash: str, feature: StoredFeature, owner: str) -> StoredFeature | None:
        return feature

    def release(self, owner: str, mm_hash: str) -> None:
        self._unhold(mm_hash, owner)
        self._local.release(owner, mm_hash)

    def event(self, mm_hash: str, feature: StoredFeature, request_id: str) -> FeatureEvent:
        if feature.offset is not None:
            return self._local.event(mm_hash, feature, request_id)
        return feature.event(mm_hash, request_id, store=STORE)

    def fetch(self, event: FeatureEvent) -> bytearray:
        if event.store != STORE:
            return self._local.fetch(event)
        with observe_fetch(self._observe, "mooncake", event):
            getting = self._fetching.submit(self._get, event)
            try:
                return getting.result(self._timeout_s)
            except FutureTimeout as error:
                getting.cancel()
                raise TransferError(
                    f"feature {event.mm_hash[:12]} did not arrive within {self._timeout_s:g} s"
                ) from error

    def _get(self, event: FeatureEvent) -> bytearray:
        try:
            nbytes = event.nbytes + _TRAILER_BYTES
            with self._pool.take(nbytes, self._timeout_s) as staged:
                self._client.get(event.mm_hash, staged.address, nbytes)
                data = bytearray(staged.memory[: event.nbytes])
            try:
                verify_checksum(event, data)
            except TransferError:
                self._client.remove(event.mm_hash, force=True)  # or it would be announced again
                raise
        except StoreUnreachable as error:
            raise TransferError(f"cannot get feature {event.mm_hash[:12]}: {error}") from error
        return data

    def close(self) -> None:
        for threads in (self._threads, self._fetching):
            threads.shutdown(wait=False, cancel_futures=True)
        self._local.close()
        self._client.close()
        self._pool.close()

    def check_integrity(self) -> None:
        self._cache.check_integrity()
        self._leased.check_integrity()
        self._local.check_integrity()
        self._pool.check_integrity()

    # ------------------------------------------------------------------ on the event loop

    async def _acquire_stored(self, mm_hash: str, owner: str) -> StoredFeature | None:
        """Find a feature in the store; hold it if this process put it. Raises TransferError after the timeout."""
        self._hold(mm_hash, owner)
        found, origin = None, ""
        try:
            found, origin = await asyncio.wait_for(self._run(self._find, mm_hash), self._timeout_s)
        except TimeoutError as error:
            raise TransferError(f"feature {mm_hash[:12]} did not arrive in time") from error
        finally:
            if found is None:  # a restarted master has forgotten our features
                self._unhold(mm_hash, owner)
        if found is not None and origin != self._origin:  # a master forgot ours, and another put it again
            self._cache.discard(mm_hash)
            self._leased.discard(mm_hash)
        elif found is not None and mm_hash not in self._cache and mm_hash not in self._leased:
            self._leased.put(mm_hash, mm_hash, 0, owner)  # our put timed out or is about to be recorded
        self._hold(mm_hash, owner)  # again: the put may have been recorded by now
        return found

    def _hold(self, mm_hash: str, owner: str) -> None:
        self._cache.acquire(mm_hash, owner)
        self._leased.acquire(mm_hash, owner)

    def _unhold(self, mm_hash: str, owner: str) -> None:
        self._cache.release(owner, mm_hash)
        self._leased.release(owner, mm_hash)

    async def _put(
        self, mm_hash: str, data: memoryview, shape: list[int], dtype: str, owner: str
    ) -> StoredFeature | None:
        """Find or put a feature; return the stored one, or None if the store does not accept it."""
        started = time.monotonic()
        async with self._one_at_a_time:
            try:
                found = await self._acquire_stored(mm_hash, owner)
            except TransferError:
                return None  # a feature that cannot be read cannot be replaced yet
            if found is not None:
                return found
            digest = await self._run(checksum, data)
            feature = StoredFeature(nbytes=data.nbytes, shape=shape, dtype=dtype, checksum=digest)
            nbytes = data.nbytes + _TRAILER_BYTES
            try:
                stored = None
                while self._cache.num_bytes + nbytes > self._capacity or (
                    (stored := await self._run(self._store, mm_hash, data, feature)) is None
                ):
                    if not await self._evict_one():
                        return None
            except (StoreUnreachable, TransferError, ValueError) as error:
                logger.warning("feature %s stays in the local store: %s", mm_hash[:12], error)
                self._leased.put(mm_hash, mm_hash, 0, _EVICTOR)  # the put may still succeed
                self._leased.release(_EVICTOR, mm_hash)
                return None
            if stored is feature:
                self._cache.put(mm_hash, mm_hash, nbytes, owner)
                for other in self._leased.discard(mm_hash):  # evicting it there would remove this one
                    self._cache.acquire(mm_hash, other)
                self._observe("mooncake", "put", nbytes, time.monotonic() - started)
            return stored

    async def _evict_one(self) -> bool:
        """Remove the least recently used feature; return False if none can be removed."""
        for _ in range(len(self._leased)):
            victim = self._leased.evict_one()
            if victim is None or await self._remove(victim):
                break
        else:
            victim = None
        if victim is None:
            victim = self._cache.evict_one()
            if victim is not None:
                await self._remove(victim)
        return victim is not None

    async def _remove(self, key: str) -> bool:
        """Remove a feature; return whether it is gone, as a lease may keep it.

        Until then it stays recorded: requests can still acquire it, and the removal is retried.
        """
        self._leased.put(key, key, 0, _EVICTOR)
        try:
            removed = await self._run(self._client.remove, key)
        finally:
            self._leased.release(_EVICTOR, key)
        if removed:
            self._observe("mooncake", "evict")
            if not self._leased.is_held(key):
                self._leased.evict(key)
        return removed

    async def _run(self, function: Callable[[Unpack[_Arguments]], _T], *arguments: *_Arguments) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    # ------------------------------------------------------------------ on threads

    def _find(self, mm_hash: str) -> tuple[StoredFeature | None, str]:
        """Return a feature's description and the origin of its put, or None if no readable one is stored.

        Raises TransferError if the staging pool is full.
        """
        with suppress(StoreUnreachable), self._pool.take(_TRAILER_BYTES, self._timeout_s) as staged:
            size = self._client.size(mm_hash)
            if size is None:
                return None, ""
            try:
                return self._read_description(mm_hash, size - _TRAILER_BYTES, staged)
            except (TransferError, ValueError) as error:
                logger.warning("feature %s is lost: %s", mm_hash[:12], error)
                self._client.remove(mm_hash, force=True)  # it would block a new put
        return None, ""

    def _read_description(self, mm_hash: str, nbytes: int, staged: Staged) -> tuple[StoredFeature, str]:
        """Return the description in the trailer of an object, and its origin."""
        if nbytes < 0:
            raise ValueError("its object is too short")
        self._client.get_range(mm_hash, staged.address, nbytes, _TRAILER_BYTES)
        trailer = bytes(staged.memory[:_TRAILER_BYTES])
        length = int.from_bytes(trailer[:_LENGTH_BYTES], "big")
        found = msgspec.msgpack.decode(trailer[_LENGTH_BYTES : _LENGTH_BYTES + length], type=_Description)
        stored = StoredFeature(
            nbytes=nbytes, shape=found.shape, dtype=found.dtype, checksum=found.checksum, producer=found.producer
        )
        return stored, found.origin

    def _store(self, mm_hash: str, data: memoryview, feature: StoredFeature) -> StoredFeature | None:
        """Put a feature; return the one now stored, or None if the store is full.

        Another encoder may have put it just before, with different bytes; Mooncake does not report this.
        """
        description = msgspec.msgpack.encode(
            _Description(
                shape=feature.shape,
                dtype=feature.dtype,
                checksum=feature.checksum,
                origin=self._origin,
                producer=self._producer,
            )
        )
        assert len(description) + _LENGTH_BYTES <= _TRAILER_BYTES, "the description exceeds the trailer"
        trailer = (len(description).to_bytes(_LENGTH_BYTES, "big") + description).ljust(_TRAILER_BYTES, b"\0")
        with self._pool.take(data.nbytes + _TRAILER_BYTES, self._timeout_s) as staged:
            staged.memory[: data.nbytes] = data
            staged.memory[data.nbytes :] = trailer
            if not self._client.put(mm_hash, staged.address, staged.memory.nbytes):
                return None
            for left in reversed(range(_READ_TRIES)):
                try:
                    stored, origin = self._read_description(mm_hash, data.nbytes, staged)
                    break
                except (TransferError, ValueError):  # the other encoder is still writing
                    if not left:
                        raise
                    time.sleep(_READ_RETRY_S)
        return feature if origin == self._origin else stored
