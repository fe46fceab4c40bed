"""The consumer's side of the feature path: fetches on a hash event, verifies, caches, times, tells who waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakValueDictionary

from epd_serve.cache.feature_cache import IDLE_FEATURES, FeatureCache
from epd_serve.errors import NOT_MAPPED, PEER_UNREACHABLE, InstanceFailed
from epd_serve.protocol.wire import FeatureEvent, MediaRef
from epd_serve.transfer.reservation import Tombstones
from epd_serve.transfer.transport import NotMapped, PeerGone, TransferError

_RETRY_ROOM_S = 0.02
_ROOM_PATIENCE_S = 0.5
_NUM_FETCHES = 4
_MAX_UNUSED = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchTiming:
    """One feature's way to its first use (EPD-Serve Table 3).

    Attributes:
        transmission_s: from the event to the feature being here.
        scheduling_s: from the event until the engine would have computed with it, had it been here.
    """

    nbytes: int
    transmission_s: float
    scheduling_s: float

    @property
    def exposed_s(self) -> float:
        return max(self.transmission_s - self.scheduling_s, 0.0)

    @property
    def overlap_ratio(self) -> float:
        """1 − exposed / transmission: 1 means entirely hidden."""
        return 1.0 - self.exposed_s / self.transmission_s if self.transmission_s else 1.0


@dataclass(slots=True)
class _Fetch:
    nbytes: int
    announced_at: float
    arrived_at: float | None = None


class FeatureReceiver:
    """Features that this instance's requests need, by mm_hash.

    Events may come before or after the request that they are for. A feature that came early is held for its
    request until ``orphan_s`` have passed; one for a request that has ended is not fetched at all.

    ``capacity_bytes`` bounds what is kept beyond need, and so does the number of features that nobody needs: their
    encoder has them, too. Requests that hold some of their features and wait for room for the others, or hold them
    all and wait for blocks of each other's, would wait for ever: so after a moment that slows encoders down, a
    feature is taken in beyond the capacity.

    Args:
        fetch: the verified bytes of an announced feature; called on threads
            (:meth:`epd_serve.transfer.feature_store.FeatureStore.fetch`).
        form: what a feature must look like; another is refused, as if it had not come.
        arrived: called after each new feature.
        observe: told of each feature that was fetched, at its first use.

    Attributes:
        timeout_s: how long a request waits for its features.
        early: until when features are held for requests that have not come.
    """

    def __init__(
        self,
        capacity_bytes: int,
        fetch: Callable[[FeatureEvent], Any],
        arrived: Callable[[], None],
        *,
        form: FeatureForm,
        orphan_s: float,
        timeout_s: float,
        clock: Callable[[], float],
        observe: Callable[[FetchTiming], None] = lambda timing: None,
    ) -> None:
        self._cache: FeatureCache[Feature] = FeatureCache(capacity_bytes, IDLE_FEATURES)
        self._fetch_bytes = fetch
        self._form = form
        self._arrived = arrived
        self._orphan_s = orphan_s
        self.timeout_s = timeout_s
        self._clock = clock
        self._observe = observe
        self._lock = threading.Lock()  # of the next two
        self._fetches: dict[str, _Fetch] = {}
        self._starved: dict[str, float] = {}
        self._wanted: dict[str, asyncio.Event] = {}
        self._items: dict[str, dict[str, MediaRef]] = {}
        self.early: dict[str, float] = {}
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

    def use(self, mm_hash: str) -> Feature | None:
        """The feature for a step; None where it is not here."""
        feature = self._cache.get(mm_hash)
        if feature is not None and (self._fetches or self._starved):
            self._used(mm_hash)
        return feature

    def starved(self, mm_hash: str) -> None:
        """Work that could be done otherwise waits for this feature."""
        with self._lock:
            if len(self._starved) >= _MAX_UNUSED:  # of requests that have ended without their feature
                self._starved.clear()
            self._starved.setdefault(mm_hash, self._clock())

    def _used(self, mm_hash: str) -> None:
        now = self._clock()
        with self._lock:
            needed_at = self._starved.pop(mm_hash, now)
            fetch = self._fetches.pop(mm_hash, None)
        if fetch is None:
            return
        self._observe(
            FetchTiming(
                nbytes=fetch.nbytes,
                transmission_s=(now if fetch.arrived_at is None else fetch.arrived_at) - fetch.announced_at,
                scheduling_s=max(needed_at - fetch.announced_at, 0.0),
            )
        )

    # ------------------------------------------------------------------ on the event loop

    def expect(self, request_id: str, items: list[MediaRef]) -> set[str]:
        """Hold what is here of a request's features and take note of the rest; returns what is here, by mm_hash.

        Raises InstanceFailed for one that is here and is not of the item's length.
        """
        here: set[str] = set()
        self.early.pop(request_id, None)
        self._wanted[request_id] = asyncio.Event()
        self._items[request_id] = {item.mm_hash: item for item in items}
        for mm_hash, item in self._items[request_id].items():
            feature = self._cache.acquire(mm_hash, request_id)
            if feature is not None:
                self._form.check(item, feature)
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
        self.early.pop(request_id, None)
        self._cache.release(request_id)
        self._ended.add(request_id, True)

    def expire(self) -> None:
        """Let go of features whose request never came."""
        now = self._clock()
        for request_id in [r for r, deadline in self.early.items() if deadline <= now]:
            self.release(request_id)

    async def receive(self, event: FeatureEvent) -> None:
        """Have an announced feature fetched; return once it is here.

        Raises InstanceFailed where it cannot be had as described.
        """
        mm_hash = event.mm_hash
        if mm_hash in self._cache:
            return await self._receive(event)
        with self._lock:
            while len(self._fetches) >= _MAX_UNUSED:  # of requests that have ended without using theirs
                del self._fetches[next(iter(self._fetches))]
            fetch = self._fetches.get(mm_hash)
            if fetch is None or fetch.arrived_at is not None:  # an earlier one went without being used
                fetch = self._fetches[mm_hash] = _Fetch(event.nbytes, self._clock())
        try:
            await self._receive(event)
        finally:
            with self._lock:
                if fetch.arrived_at is None and mm_hash in self._cache:
                    fetch.arrived_at = self._clock()
                elif fetch.arrived_at is None and self._fetches.get(mm_hash) is fetch:
                    del self._fetches[mm_hash]  # failed, or its request has ended

    async def _receive(self, event: FeatureEvent) -> None:
        if self._is_over(event.request_id):
            return
        # what the gateway told us of the item, if we know that already, goes over what the encoder says
        item = self._items.get(event.request_id, {}).get(event.mm_hash, event.item)
        if item is None:
            raise InstanceFailed(f"feature {event.mm_hash[:12]}: unknown media item")
        self._form.check(item, event)
        # requests that need one feature at once share one fetch; where it fails, the next tries its own event
        async with self._turns.setdefault(event.mm_hash, asyncio.Lock()):
            if event.mm_hash not in self._cache:
                if event.nbytes > self._cache.capacity_bytes:
                    raise InstanceFailed(
                        f"a feature of {event.nbytes} bytes does not fit a cache of {self._cache.capacity_bytes}; "
                        "raise feature_cache_bytes"
                    )
                feature = await asyncio.get_running_loop().run_in_executor(self._threads, self._fetch, event)
                await self._take_in(event.request_id, event.mm_hash, feature)
            elif not self._is_over(event.request_id):
                self._hold(event.mm_hash, event.request_id)

    async def take(self, request_id: str, item: MediaRef, feature: Feature) -> None:
        """Take in a feature that this instance has encoded itself. Raises InstanceFailed for one that is wrong."""
        self._form.check(item, feature)
        await self._take_in(request_id, item.mm_hash, feature)

    async def _take_in(self, request_id: str, mm_hash: str, feature: Feature) -> None:
        await self._wait_for_room(mm_hash, feature.nbytes)
        if self._is_over(request_id):
            return
        for items in self._items.values():  # requests may have become known since the event was looked at
            if mm_hash in items:
                self._form.check(items[mm_hash], feature)
        self._cache.put(mm_hash, feature, feature.nbytes, request_id, beyond=True)
        self._hold(mm_hash, request_id)

    def _is_over(self, request_id: str) -> bool:
        """Whether a request has ended; one that came after its early features were let go has not."""
        return request_id in self._ended and request_id not in self._wanted

    def _hold(self, mm_hash: str, request_id: str) -> None:
        """For the request, and for all others that wait for this feature: else it might go before they hold it."""
        self._cache.acquire(mm_hash, request_id)
        if request_id not in self._wanted:
            self.early[request_id] = self._clock() + self._orphan_s
        for other, items in self._items.items():
            if mm_hash in items:
                self._cache.acquire(mm_hash, other)
                self._wanted[other].set()
        self._arrived()

    def check_integrity(self) -> None:
        self._cache.check_integrity()

    async def _wait_for_room(self, mm_hash: str, nbytes: int) -> None:
        deadline = self._clock() + _ROOM_PATIENCE_S
        while mm_hash not in self._cache and not self._cache.can_put(nbytes):
            if self._clock() >= deadline:
                return
            await asyncio.sleep(_RETRY_ROOM_S)

    def _fetch(self, event: FeatureEvent) -> Feature:
        try:
            data = self._fetch_bytes(event)
        except TransferError as error:
            code = PEER_UNREACHABLE if isinstance(error, PeerGone) else None
            code = NOT_MAPPED if isinstance(error, NotMapped) else code
            raise InstanceFailed(f"feature {event.mm_hash[:12]} cannot be fetched: {error}", code=code) from error
        try:
            return self._form.read(data, event.shape, event.dtype)
        except (RuntimeError, ValueError, AttributeError, TypeError) as error:
            raise InstanceFailed(
                f"feature {event.mm_hash[:12]} of {event.nbytes} bytes is no {event.shape} {event.dtype}: {error}"
            ) from error


class Feature(Protocol):
    """A picture as the language model takes it. A tensor is one."""

    @property
    def shape(self) -> Sequence[int]:
        """[tokens, width]"""
        ...

    @property
    def dtype(self) -> Any:
        """A name such as ``float32``, or torch's."""
        ...

    @property
    def nbytes(self) -> int: ...


def tensor_of(data: Any, shape: Sequence[int], dtype: str) -> Any:
    """Bytes, or a tensor [nbytes] uint8, as a tensor of that shape and dtype."""
    import torch

    if isinstance(data, torch.Tensor):
        return data.view(getattr(torch, dtype)).view(shape)
    return torch.frombuffer(data, dtype=getattr(torch, dtype)).view(shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureForm:
    """[rows of the item's feature, ``width``] of ``dtype``.

    Attributes:
        num_tokens: rows of an item's feature.
        read: bytes, shape and dtype → the feature; called on a thread once they are here.
    """

    dtype: str
    width: int
    num_tokens: Callable[[MediaRef], int]
    read: Callable[[Any, Sequence[int], str], Feature] = tensor_of

    def check(self, item: MediaRef, feature: Feature | FeatureEvent) -> None:
        """Raise InstanceFailed for a feature that is none of this model's for ``item``."""
        shape, dtype = list(feature.shape), str(feature.dtype).removeprefix("torch.")
        expected = [self.num_tokens(item), self.width]
        if shape != expected or dtype != self.dtype:
            frames = f" and {item.num_frames} frames" if item.modality == "video" else ""
            size = (
                f"{item.num_samples} samples" if item.modality == "audio" else f"{item.width}x{item.height} pixels"
            )
            raise InstanceFailed(
                f"feature {item.mm_hash[:12]} is {shape} {dtype}; a media item ({item.modality}) of "
                f"{size}{frames} has {expected} {self.dtype} here"
            )
