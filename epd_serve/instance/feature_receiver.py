"""Consumer side of the feature path: fetch on a hash event, verify, cache, measure, wake waiting requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from epd_serve.cache.feature_cache import IDLE_FEATURES, FeatureCache
from epd_serve.errors import NOT_MAPPED, PEER_UNREACHABLE, InstanceFailed
from epd_serve.protocol.wire import FeatureEvent, MediaRef
from epd_serve.recent import Recent
from epd_serve.transfer.transport import NotMapped, PeerGone, TransferError

if TYPE_CHECKING:
    from epd_serve.engine.engine import Engine
    from epd_serve.engine.telemetry import InstanceMetrics
    from epd_serve.models.family import Family
    from epd_serve.transfer.feature_store import FeatureStore

#: How long to hold a feature or a hand-off before its request arrives.
ORPHAN_S = 10.0
_RETRY_ROOM_S = 0.02
_ROOM_PATIENCE_S = 0.5
_NUM_FETCHES = 4
_MAX_UNUSED = 4096


@dataclass(frozen=True, kw_only=True)
class FeatureForm:
    """Expected form of features: [rows, ``width``] of ``dtype``, with the item's rows from ``family``."""

    dtype: str
    width: int
    family: Family

    def check(self, item: MediaRef, feature: Any) -> None:
        """Raise InstanceFailed if a feature or its event does not have this model's form for ``item``."""
        shape, dtype = list(feature.shape), str(feature.dtype).removeprefix("torch.")
        expected = [self.family.num_tokens(item), self.width]
        if shape != expected or dtype != self.dtype:
            frames = f" and {item.num_frames} frames" if item.modality == "video" else ""
            size = (
                f"{item.num_samples} samples" if item.modality == "audio" else f"{item.width}x{item.height} pixels"
            )
            raise InstanceFailed(
                f"feature {item.mm_hash[:12]} is {shape} {dtype}; a media item ({item.modality}) of "
                f"{size}{frames} has {expected} {self.dtype} here"
            )

    def read(self, data: Any, shape: Sequence[int], dtype: str) -> Any:
        """Convert bytes or a tensor [nbytes] uint8 to a feature. Runs on a thread."""
        import torch

        if isinstance(data, torch.Tensor):
            return data.view(getattr(torch, dtype)).view(shape)
        return torch.frombuffer(data, dtype=getattr(torch, dtype)).view(shape)


@dataclass(eq=False)
class FeatureReceiver:
    """Fetches and holds the features of this instance's requests, by mm_hash.

    Call it on the event loop, except for the methods of the engine's thread. An event may precede its request; the
    feature is then held for ORPHAN_S. Features of ended requests are not fetched.

    ``capacity_bytes`` and a limit on their number bound unneeded features; their encoder has them too. If needed
    features exceed the capacity, requests could wait for each other's room or blocks forever, so after a short
    delay that slows encoders down, a feature is accepted beyond the capacity.

    Attributes:
        engine: woken by each new feature.
    """

    store: FeatureStore
    engine: Engine
    metrics: InstanceMetrics
    form: FeatureForm
    capacity_bytes: int
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._cache: FeatureCache[Any] = FeatureCache(self.capacity_bytes, IDLE_FEATURES)
        self._fetched: dict[str, tuple[int, float, float]] = {}  # until used: bytes, when announced, when received
        self._starved: dict[str, float] = {}
        self._wanted: dict[str, asyncio.Event] = {}
        self._items: dict[str, dict[str, MediaRef]] = {}
        self._early: dict[str, float] = {}  # request id → deadline of features held before their request
        self._ended: Recent[str] = Recent()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        # a separate pool: fetches that hang must not delay tokenization of other requests
        self._threads = ThreadPoolExecutor(_NUM_FETCHES, thread_name_prefix="fetch")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def num_owners(self) -> int:
        return self._cache.num_owners

    # ------------------------------------------------------------------ from the engine's thread

    def has(self, mm_hash: str) -> bool:
        """Return whether :meth:`use` would return the feature."""
        return mm_hash in self._cache

    def use(self, mm_hash: str) -> Any | None:
        """Return the feature for a step, or None if it has not arrived."""
        feature = self._cache.get(mm_hash)
        if feature is not None and (self._fetched or self._starved):
            now = self.clock()
            needed_at = self._starved.pop(mm_hash, now)
            fetched = self._fetched.pop(mm_hash, None)
            if fetched is not None:
                nbytes, announced_at, arrived_at = fetched
                self.metrics.feature_used(nbytes, arrived_at - announced_at, max(needed_at - announced_at, 0.0))
        return feature

    def starved(self, mm_hash: str) -> None:
        """Record that ready work waits only for this feature."""
        if len(self._starved) >= _MAX_UNUSED:  # left over from requests that ended without their feature
            self._starved.clear()
        self._starved.setdefault(mm_hash, self.clock())

    # ------------------------------------------------------------------ requests

    def expect(self, request_id: str, items: list[MediaRef]) -> set[str]:
        """Register a request, hold its features stored here, and return their mm_hashes.

        Raises InstanceFailed for a feature whose length does not match its item.
        """
        here: set[str] = set()
        self._early.pop(request_id, None)
        self._wanted[request_id] = asyncio.Event()
        self._items[request_id] = {item.mm_hash: item for item in items}
        for mm_hash, item in self._items[request_id].items():
            feature = self._cache.acquire(mm_hash, request_id)
            if feature is not None:
                self.form.check(item, feature)
                here.add(mm_hash)
        return here

    async def complete(self, request_id: str, mm_hashes: Collection[str]) -> None:
        """Wait until these features of a request are here."""
        changed = self._wanted[request_id]
        while not all(map(self.has, mm_hashes)):
            await changed.wait()
            changed.clear()

    def release(self, request_id: str) -> None:
        """Release a request's features and ignore its later events. Idempotent."""
        self._wanted.pop(request_id, None)
        self._items.pop(request_id, None)
        self._early.pop(request_id, None)
        self._cache.release(request_id)
        self._ended.add(request_id)

    def expire(self) -> None:
        """Release features whose request never came."""
        now = self.clock()
        for request_id in [r for r, deadline in self._early.items() if deadline <= now]:
            self.release(request_id)

    # ------------------------------------------------------------------ features

    async def receive(self, event: FeatureEvent) -> None:
        """Fetch an announced feature; return once it is here.

        Raises InstanceFailed if it cannot be fetched or differs from the event.
        """
        await self._receive(event, self.clock())

    async def _receive(self, event: FeatureEvent, announced_at: float) -> None:
        if self._is_over(event.request_id):
            return
        # the gateway's description of the item, if known, takes precedence over the encoder's
        item = self._items.get(event.request_id, {}).get(event.mm_hash, event.item)
        if item is None:
            raise InstanceFailed(f"feature {event.mm_hash[:12]}: unknown media item")
        self.form.check(item, event)
        # concurrent requests for a feature share one fetch; if it fails, the next request tries its own event
        async with self._turns.setdefault(event.mm_hash, asyncio.Lock()):
            if event.mm_hash not in self._cache:
                if event.nbytes > self._cache.capacity_bytes:
                    raise InstanceFailed(
                        f"a feature of {event.nbytes} bytes does not fit a cache of {self._cache.capacity_bytes}; "
                        "raise feature_cache_bytes"
                    )
                feature = await asyncio.get_running_loop().run_in_executor(self._threads, self._fetch, event)
                await self._take_in(event.request_id, event.mm_hash, feature, announced_at)
            elif not self._is_over(event.request_id):
                self._hold(event.mm_hash, event.request_id)

    async def take(self, request_id: str, item: MediaRef, feature: Any) -> None:
        """Add a feature encoded by this instance. Raises InstanceFailed if it does not have the expected form."""
        self.form.check(item, feature)
        await self._take_in(request_id, item.mm_hash, feature, None)

    async def _take_in(self, request_id: str, mm_hash: str, feature: Any, announced_at: float | None) -> None:
        deadline = self.clock() + _ROOM_PATIENCE_S
        while mm_hash not in self._cache and not self._cache.can_put(feature.nbytes):
            if self.clock() >= deadline:
                break
            await asyncio.sleep(_RETRY_ROOM_S)
        if self._is_over(request_id):
            return
        for items in self._items.values():  # requests that arrived during the fetch
            if mm_hash in items:
                self.form.check(items[mm_hash], feature)
        if announced_at is None:
            self._fetched.pop(mm_hash, None)
        else:
            if len(self._fetched) >= _MAX_UNUSED:  # left over from requests that ended without using theirs
                self._fetched.clear()
            self._fetched[mm_hash] = (feature.nbytes, announced_at, self.clock())
        self._cache.put(mm_hash, feature, feature.nbytes, request_id, beyond=True)
        self._hold(mm_hash, request_id)

    def _is_over(self, request_id: str) -> bool:
        """Return whether a request has ended; one that arrived after its early features expired has not."""
        return request_id in self._ended and request_id not in self._wanted

    def _hold(self, mm_hash: str, request_id: str) -> None:
        """Hold a feature for the request and all others that wait for it, before it can be evicted."""
        self._cache.acquire(mm_hash, request_id)
        if request_id not in self._wanted:
            self._early[request_id] = self.clock() + ORPHAN_S
        for other, items in self._items.items():
            if mm_hash in items:
                self._cache.acquire(mm_hash, other)
                self._wanted[other].set()
        self.engine.wake()

    def _fetch(self, event: FeatureEvent) -> Any:
        what = f"feature {event.mm_hash[:12]}"
        try:
            data = self.store.fetch(event)
        except TransferError as error:
            code = PEER_UNREACHABLE if isinstance(error, PeerGone) else None
            code = NOT_MAPPED if isinstance(error, NotMapped) else code
            raise InstanceFailed(f"{what} cannot be fetched: {error}", code=code) from error
        try:
            return self.form.read(data, event.shape, event.dtype)
        except (RuntimeError, ValueError, AttributeError, TypeError) as error:
            raise InstanceFailed(
                f"{what} of {event.nbytes} bytes does not have form {event.shape} {event.dtype}: {error}"
            ) from error

    def check_integrity(self) -> None:
        self._cache.check_integrity()
