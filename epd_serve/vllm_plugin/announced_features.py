"""Features announced to P: fetch them, and tell requests whether to wait."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping

from epd_serve.errors import InstanceFailed
from epd_serve.protocol.wire import FeatureEvent, FeatureWithdrawn, Region, decode
from epd_serve.recent import Recent
from epd_serve.rpc.server import Handler, Reply
from epd_serve.transfer.feature_store import FeatureSlab, StoredFeature, checksum, read_feature
from epd_serve.transfer.transport import TransferError, Transport

#: Prefix of the owner of a feature whose request has not asked for it yet.
_ARRIVED = "arrived:"


class AnnouncedFeatures:
    """Fetches announced features immediately, on the announcing threads.

    P encodes a feature itself if it is withdrawn, cannot be fetched as described, or is not announced within
    ``timeout_s`` of the request's first question.
    """

    def __init__(
        self,
        transport: Transport,
        capacity_bytes: int,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = transport
        self._memory = FeatureMemory(transport, capacity_bytes)
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._settled: Recent[str] = Recent()  # by request and feature: no more news will come
        self._asked_at: dict[str, float] = {}
        self._arrivals: OrderedDict[str, float] = OrderedDict()
        self._news = threading.Event()

    @property
    def calls(self) -> Mapping[str, Handler]:
        """Calls that announce and withdraw features."""
        return {"/feature/event": self._event, "/feature/withdraw": self._withdrawal}

    async def _event(self, body: bytes) -> Reply:
        await asyncio.to_thread(self.fetch, decode(body, FeatureEvent))
        return Reply()

    async def _withdrawal(self, body: bytes) -> Reply:
        withdrawn = decode(body, FeatureWithdrawn)
        self.withdraw(withdrawn.request_id, withdrawn.mm_hash)
        return Reply()

    def is_settled(self, request_id: str, trace_id: str, mm_hash: str) -> bool:
        """Return whether a feature has arrived or will never arrive, so that a request need not wait.

        ``request_id`` is the engine's id of the request, ``trace_id`` that of announcements.
        """
        if mm_hash in self._memory:
            return True
        now = self._clock()
        with self._lock:
            if f"{trace_id}>{mm_hash}" in self._settled:
                return True
            waited_s = now - self._asked_at.setdefault(request_id, now)
        if waited_s < self._timeout_s:
            return False
        self.withdraw(trace_id, mm_hash)
        return True

    def hold(self, request_id: str, mm_hash: str) -> bool:
        """Return whether the feature is here; if so, hold it until :meth:`forget`."""
        is_here = self._memory.acquire(mm_hash, request_id) is not None
        owner = _ARRIVED + mm_hash
        with self._lock:
            if self._arrivals.pop(owner, None) is None:
                return is_here
        self._memory.release(owner)
        return is_here

    def wait(self, timeout_s: float) -> None:
        """Wait for news of any feature since the last call, at most ``timeout_s``."""
        if self._news.wait(timeout_s):
            self._news.clear()

    def locate(self, mm_hash: str, request_id: str) -> tuple[Region, StoredFeature] | None:
        kept = self._memory.acquire(mm_hash, request_id)
        return None if kept is None else (self._memory.region, kept)

    def forget(self, request_id: str) -> None:
        """Release everything of a finished request."""
        self._memory.release(request_id)
        with self._lock:
            self._asked_at.pop(request_id, None)
        self._release_stale()

    def check_integrity(self) -> None:
        self._memory.check_integrity()

    def fetch(self, event: FeatureEvent) -> None:
        """Copy an announced feature here. Raises InstanceFailed if it differs from its description."""
        # held for a while without a request, which may not have arrived yet
        owner = _ARRIVED + event.mm_hash
        if self._memory.acquire(event.mm_hash, owner) is None:
            try:
                data = memoryview(read_feature(self._transport, event))
                self._release_stale()
                if not self._memory.put(event.mm_hash, data, event.shape, event.dtype, owner, event.checksum):
                    raise TransferError(f"no room for {event.nbytes} bytes; raise feature_cache_bytes")
            except TransferError as error:
                self.withdraw(event.request_id, event.mm_hash)
                raise InstanceFailed(f"feature {event.mm_hash[:12]}: {error}") from error
        with self._lock:
            self._arrivals[owner] = self._clock()
            self._settled.add(f"{event.request_id}>{event.mm_hash}")
        self._news.set()

    def withdraw(self, request_id: str, mm_hash: str) -> None:
        """Record that no instance sends this feature for this request."""
        with self._lock:
            self._settled.add(f"{request_id}>{mm_hash}")
        self._news.set()

    def _release_stale(self) -> None:
        """Release features that arrived long ago without a request."""
        latest = self._clock() - self._timeout_s
        with self._lock:
            old = [owner for owner, at in self._arrivals.items() if at < latest]
            for owner in old:
                del self._arrivals[owner]
        for owner in old:
            self._memory.release(owner)


class FeatureMemory(FeatureSlab):
    """A thread-safe feature store that evicts the least recently used features without an owner."""

    def __init__(self, transport: Transport, capacity_bytes: int) -> None:
        super().__init__(transport, capacity_bytes)
        self._lock = threading.Lock()
        self._evicted: set[str] = set()

    def __contains__(self, mm_hash: str) -> bool:
        with self._lock:
            return mm_hash in self._cache

    def acquire(self, mm_hash: str, owner: str) -> StoredFeature | None:
        """Hold a feature until :meth:`release`; None if it is not here."""
        with self._lock:
            return self.hold(mm_hash, owner)

    def put(
        self, mm_hash: str, data: memoryview, shape: list[int], dtype: str, owner: str, digest: str = ""
    ) -> StoredFeature | None:
        """Copy a feature in and hold it for ``owner``; None without room. ``digest``: its checksum, if known."""
        digest = digest or checksum(data)
        with self._lock:
            if (found := self.hold(mm_hash, owner)) is not None:
                return found
            if data.nbytes > self.nbytes or (offset := self.allocate(data.nbytes)) is None:
                return None
            self._slab.buffer[offset : offset + data.nbytes] = data
            kept = StoredFeature(offset=offset, nbytes=data.nbytes, shape=shape, dtype=dtype, checksum=digest)
            self.insert(mm_hash, kept, owner)
            return kept

    def release(self, owner: str, mm_hash: str | None = None) -> None:
        with self._lock:
            super().release(owner, mm_hash)

    def take_evicted(self) -> set[str]:
        """Return the features evicted since the last call."""
        with self._lock:
            evicted, self._evicted = self._evicted, set()
            return evicted

    def check_integrity(self) -> None:
        with self._lock:
            super().check_integrity()

    def _evict(self, mm_hash: str, feature: StoredFeature) -> None:
        super()._evict(mm_hash, feature)
        self._evicted.add(mm_hash)
