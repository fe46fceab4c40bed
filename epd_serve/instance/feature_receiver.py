"""The consumer's side of the feature path: fetch on a hash event, verify, cache, time, wake who waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from epd_serve.cache.feature_cache import IDLE_FEATURES, FeatureCache
from epd_serve.errors import NOT_MAPPED, PEER_UNREACHABLE, InstanceFailed
from epd_serve.protocol.wire import FeatureEvent, MediaRef
from epd_serve.transfer.reservation import Tombstones
from epd_serve.transfer.transport import NotMapped, PeerGone, TransferError

if TYPE_CHECKING:
    from epd_serve.engine.engine import Engine
    from epd_serve.instance.metrics import InstanceMetrics
    from epd_serve.models.family import Family
    from epd_serve.transfer.feature_store import FeatureStore

#: How long a feature, or a hand-off, is held for a request that nobody has asked for yet.
ORPHAN_S = 10.0
_RETRY_ROOM_S = 0.02
_ROOM_PATIENCE_S = 0.5
_NUM_FETCHES = 4
_MAX_UNUSED = 4096


@dataclass(frozen=True, kw_only=True)
class FeatureForm:
    """[rows of the item's feature, ``width``] of ``dtype``. ``family`` knows the rows of each item."""

    dtype: str
    width: int
    family: Family

    def check(self, item: MediaRef, feature: Any) -> None:
        """Raise InstanceFailed for a feature, or an event of one, that is none of this model's for ``item``."""
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
        """Return bytes, or a tensor [nbytes] uint8, as a feature. Runs on a thread."""
        import torch

        if isinstance(data, torch.Tensor):
            return data.view(getattr(torch, dtype)).view(shape)
        return torch.frombuffer(data, dtype=getattr(torch, dtype)).view(shape)


@dataclass(eq=False)
class FeatureReceiver:
    """Features that this instance's requests need, by mm_hash. On the event loop, but for what the engine asks.

    Events may come before or after the request that they are for. A feature that came early is held for its
    request until ORPHAN_S have passed; one for a request that has ended is not fetched at all.

    ``capacity_bytes`` bounds what is kept beyond need, and so does the number of features that nobody needs: their
    encoder has them, too. Requests that hold some of their features and wait for room for the others, or hold them
    all and wait for blocks of each other's, would wait for ever: so after a moment that slows encoders down, a
    feature is taken in beyond the capacity.

    Attributes:
        timeout_s: how long a request waits for its features.
        engine: is woken by each new feature.
    """

    store: FeatureStore
    engine: Engine
    metrics: InstanceMetrics
    form: FeatureForm
    capacity_bytes: int
    timeout_s: float
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._cache: FeatureCache[Any] = FeatureCache(self.capacity_bytes, IDLE_FEATURES)
        self._fetched: dict[str, tuple[int, float, float]] = {}  # until used: bytes, when announced, when here
        self._starved: dict[str, float] = {}
        self._wanted: dict[str, asyncio.Event] = {}
        self._items: dict[str, dict[str, MediaRef]] = {}
        self._early: dict[str, float] = {}  # until when features are held for requests that have not come
        self._ended: Tombstones[bool] = Tombstones()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        # of its own: fetches that hang must not hold up the tokenising of other requests
        self._threads = ThreadPoolExecutor(_NUM_FETCHES, thread_name_prefix="fetch")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def num_owners(self) -> int:
        return self._cache.num_owners

    # ------------------------------------------------------------------ from the engine's thread

    def has(self, mm_hash: str) -> bool:
        """Whether :meth:`use` is worth calling."""
        return mm_hash in self._cache

    def use(self, mm_hash: str) -> Any | None:
        """The feature for a step; None where it is not here."""
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
        """Note that work which could be done otherwise waits for this feature."""
        if len(self._starved) >= _MAX_UNUSED:  # of requests that have ended without their feature
            self._starved.clear()
        self._starved.setdefault(mm_hash, self.clock())

    # ------------------------------------------------------------------ requests

    def expect(self, request_id: str, items: list[MediaRef]) -> set[str]:
        """Hold what is here of a request's features and take note of the rest; returns what is here, by mm_hash.

        Raises InstanceFailed for one that is here and is not of the item's length.
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

    async def complete(self, request_id: str, items: list[MediaRef]) -> None:
        """Wait until all of a request's features are here."""
        changed = self._wanted[request_id]
        while any(item.mm_hash not in self._cache for item in items):
            await changed.wait()
            changed.clear()

    def release(self, request_id: str) -> None:
        """The request needs its features no more; later events for it are ignored. Idempotent."""
        self._wanted.pop(request_id, None)
        self._items.pop(request_id, None)
        self._early.pop(request_id, None)
        self._cache.release(request_id)
        self._ended.add(request_id, True)

    def expire(self) -> None:
        """Let go of features whose request never came."""
        now = self.clock()
        for request_id in [r for r, deadline in self._early.items() if deadline <= now]:
            self.release(request_id)

    # ------------------------------------------------------------------ features

    async def receive(self, event: FeatureEvent) -> None:
        """Have an announced feature fetched; return once it is here.

        Raises InstanceFailed where it cannot be had as described.
        """
        await self._receive(event, self.clock())

    async def _receive(self, event: FeatureEvent, announced_at: float) -> None:
        if self._is_over(event.request_id):
            return
        # what the gateway told us of the item, if we know that already, goes over what the encoder says
        item = self._items.get(event.request_id, {}).get(event.mm_hash, event.item)
        if item is None:
            raise InstanceFailed(f"feature {event.mm_hash[:12]}: unknown media item")
        self.form.check(item, event)
        # requests that need one feature at once share one fetch; where it fails, the next tries its own event
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
        """Take in a feature that this instance has encoded itself. Raises InstanceFailed for one that is wrong."""
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
        for items in self._items.values():  # requests may have become known since the event was looked at
            if mm_hash in items:
                self.form.check(items[mm_hash], feature)
        if announced_at is None:
            self._fetched.pop(mm_hash, None)
        else:
            if len(self._fetched) >= _MAX_UNUSED:  # of requests that have ended without using theirs
                self._fetched.clear()
            self._fetched[mm_hash] = (feature.nbytes, announced_at, self.clock())
        self._cache.put(mm_hash, feature, feature.nbytes, request_id, beyond=True)
        self._hold(mm_hash, request_id)

    def _is_over(self, request_id: str) -> bool:
        """Whether a request has ended; one that came after its early features were let go has not."""
        return request_id in self._ended and request_id not in self._wanted

    def _hold(self, mm_hash: str, request_id: str) -> None:
        """For the request, and for all others that wait for this feature: else it might go before they hold it."""
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
                f"{what} of {event.nbytes} bytes is no {event.shape} {event.dtype}: {error}"
            ) from error

    def check_integrity(self) -> None:
        self._cache.check_integrity()
