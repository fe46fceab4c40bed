"""The feature store over Mooncake Store: each feature is put once, and every instance finds it by mm_hash."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from typing import TypeVar, TypeVarTuple, Unpack

import msgspec

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

_T = TypeVar("_T")
_Arguments = TypeVarTuple("_Arguments")


class _Description(Message, frozen=True):
    shape: list[int]
    dtype: str
    checksum: str
    producer: str = ""


class MooncakeFeatureStore:
    """A :class:`epd_serve.transfer.feature_store.FeatureStore` over all instances that share a master.

    An instance puts features into its own segment. The master leases a feature for some seconds when it is put or
    looked up, and evicts those without a lease, oldest first; a missing feature is encoded again. A feature
    that the store refuses, or while its master is down, goes into ``local``: no answer depends on the store.

    Args:
        local: store for refused features, and for all features if this instance lends no segment.
        producer: name of this instance in its features.
    """

    on_device = False

    def __init__(
        self,
        client: StoreClient,
        local: EmbeddedFeatureStore,
        options: MooncakeOptions,
        observe: StoreObserver = drop_operation,
        producer: str = "",
    ) -> None:
        self._client = client
        self._producer = producer
        self._observe = observe
        self._local = local
        self._timeout_s = options.timeout_s
        self._pool = StagingPool(options.staging_bytes, max(options.alignment_bytes, 64))
        client.register(self._pool.address, self._pool.nbytes)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="store")
        # Mooncake waits a minute for the first answer of a hung process. We wait only for our timeout, and have
        # enough threads for other calls.
        self._fetching = ThreadPoolExecutor(_NUM_FETCHES, thread_name_prefix="store-fetch")

    @property
    def num_owners(self) -> int:
        return self._local.num_owners

    @property
    def num_bytes(self) -> int:
        return self._local.num_bytes

    async def acquire(self, mm_hash: str, owner: str) -> StoredFeature | None:
        local = self._local.hold(mm_hash, owner)
        if local is not None:
            self._observe("embedded", "hit")
            return local
        found = None
        with suppress(TransferError, TimeoutError):
            found = await self._run(self._find, mm_hash)
        self._observe("mooncake", "miss" if found is None else "hit")
        return found

    async def put(
        self, mm_hash: str, data: memoryview, shape: list[int], dtype: str, owner: str
    ) -> StoredFeature | None:
        if self._client.has_segment and data.nbytes + _TRAILER_BYTES <= self._pool.nbytes:
            try:
                if (stored := await self._run(self._put, mm_hash, data, shape, dtype)) is not None:
                    return stored
            except (StoreUnreachable, TransferError, ValueError, TimeoutError) as error:
                logger.warning("feature %s stays in the local store: %s", mm_hash[:12], error or "no answer")
        return await self._local.put(mm_hash, data, shape, dtype, owner)

    async def on_host(self, mm_hash: str, feature: StoredFeature, owner: str) -> StoredFeature | None:
        return feature

    def release(self, owner: str, mm_hash: str) -> None:
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

    def close(self) -> None:
        for threads in (self._threads, self._fetching):
            threads.shutdown(wait=False, cancel_futures=True)
        self._local.close()
        self._client.close()
        self._pool.close()

    def check_integrity(self) -> None:
        self._local.check_integrity()
        self._pool.check_integrity()

    async def _run(self, function: Callable[[Unpack[_Arguments]], _T], *arguments: *_Arguments) -> _T:
        """Run a function on a thread, and wait no longer than the timeout; it may still finish afterwards."""
        running = asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)
        return await asyncio.wait_for(running, self._timeout_s)

    # ------------------------------------------------------------------ on threads

    def _get(self, event: FeatureEvent) -> bytearray:
        try:
            nbytes = event.nbytes + _TRAILER_BYTES
            with self._pool.take(nbytes, self._timeout_s) as staged:
                self._client.get(event.mm_hash, staged.address, nbytes)
                data = bytearray(staged.memory[: event.nbytes])
            try:
                verify_checksum(event, data)
            except TransferError:
                self._client.remove(event.mm_hash)  # or it would be announced again
                raise
        except StoreUnreachable as error:
            raise TransferError(f"cannot get feature {event.mm_hash[:12]}: {error}") from error
        return data

    def _find(self, mm_hash: str) -> StoredFeature | None:
        """Return a feature's description, or None if no readable one is stored.

        Raises TransferError if the staging pool is full.
        """
        with suppress(StoreUnreachable), self._pool.take(_TRAILER_BYTES, self._timeout_s) as staged:
            size = self._client.size(mm_hash)
            if size is None:
                return None
            try:
                return self._read_description(mm_hash, size - _TRAILER_BYTES, staged)
            except (TransferError, ValueError) as error:
                logger.warning("feature %s is lost: %s", mm_hash[:12], error)
                self._client.remove(mm_hash)  # it would block a new put
        return None

    def _read_description(self, mm_hash: str, nbytes: int, staged: Staged) -> StoredFeature:
        """Return the description in the trailer of an object."""
        if nbytes < 0:
            raise ValueError("its object is too short")
        self._client.get_range(mm_hash, staged.address, nbytes, _TRAILER_BYTES)
        trailer = bytes(staged.memory[:_TRAILER_BYTES])
        length = int.from_bytes(trailer[:_LENGTH_BYTES], "big")
        found = msgspec.msgpack.decode(trailer[_LENGTH_BYTES : _LENGTH_BYTES + length], type=_Description)
        return StoredFeature(
            nbytes=nbytes, shape=found.shape, dtype=found.dtype, checksum=found.checksum, producer=found.producer
        )

    def _put(self, mm_hash: str, data: memoryview, shape: list[int], dtype: str) -> StoredFeature | None:
        """Find or put a feature; return the one now stored, or None if the store is full.

        Another encoder may have put it just before, with different bytes; Mooncake does not report this.
        """
        started = time.monotonic()
        if (found := self._find(mm_hash)) is not None:
            return found
        description = msgspec.msgpack.encode(_Description(shape, dtype, checksum(data), self._producer))
        assert len(description) + _LENGTH_BYTES <= _TRAILER_BYTES, "the description exceeds the trailer"
        trailer = (len(description).to_bytes(_LENGTH_BYTES, "big") + description).ljust(_TRAILER_BYTES, b"\0")
        with self._pool.take(data.nbytes + _TRAILER_BYTES, self._timeout_s) as staged:
            staged.memory[: data.nbytes] = data
            staged.memory[data.nbytes :] = trailer
            if not self._client.put(mm_hash, staged.address, staged.memory.nbytes):
                return None
            for left in reversed(range(_READ_TRIES)):
                try:
                    stored = self._read_description(mm_hash, data.nbytes, staged)
                    break
                except (TransferError, ValueError):  # the other encoder is still writing
                    if not left:
                        raise
                    time.sleep(_READ_RETRY_S)
        self._observe("mooncake", "put", data.nbytes + _TRAILER_BYTES, time.monotonic() - started)
        return stored
