"""An engine's view of the features: which are here, which could be, and what their transfer cost it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from epd_serve.config.sections import FeaturePrefetch
from epd_serve.protocol.wire import FeatureEvent

_MAX_UNUSED = 4096


class Features(Protocol):
    """The part of :class:`~epd_serve.instance.feature_receiver.FeatureReceiver` that is used here."""

    def get(self, mm_hash: str) -> Tensor | None: ...

    async def receive(self, event: FeatureEvent) -> None: ...


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


class _Announcement:
    """A feature that is fetched when the engine asks for it."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self.due = asyncio.Event()
        self.done = asyncio.Event()

    async def fetched(self) -> None:
        """Have it fetched; return when it is here or has failed."""
        self.due.set()
        await self.done.wait()


class FeatureSupply:
    """Between the events of encoders, the receiver that fetches, and the engine that needs features.

    With ``async`` prefetch an announced feature is fetched at once; with ``sync`` the engine's thread fetches it
    when a step is to be computed with it, and waits.

    Args:
        wake: called when an engine may find something new.
        observe: told of each feature that was fetched, at its first use.
    """

    def __init__(
        self,
        receiver: Features,
        loop: asyncio.AbstractEventLoop,
        prefetch: FeaturePrefetch,
        *,
        clock: Callable[[], float],
        wake: Callable[[], None],
        observe: Callable[[FetchTiming], None],
    ) -> None:
        self._receiver = receiver
        self._loop = loop
        self._is_sync = prefetch == "sync"
        self._clock = clock
        self._wake = wake
        self._observe = observe
        self._lock = threading.Lock()
        self._fetches: dict[str, _Fetch] = {}
        self._starved: dict[str, float] = {}
        self._announced: dict[str, _Announcement] = {}

    async def receive(self, event: FeatureEvent) -> None:
        """Have an announced feature fetched; return once it is here. Raises ServeError where it cannot be had."""
        mm_hash = event.mm_hash
        if self._receiver.get(mm_hash) is not None:
            await self._receiver.receive(event)
            return
        with self._lock:
            while len(self._fetches) >= _MAX_UNUSED:  # of requests that have ended without using theirs
                del self._fetches[next(iter(self._fetches))]
            fetch = self._fetches.get(mm_hash)
            if fetch is None or fetch.arrived_at is not None:  # an earlier one went without being used
                fetch = self._fetches[mm_hash] = _Fetch(event.nbytes, self._clock())
        try:
            if self._is_sync:
                await self._receive_when_due(event)
            else:
                await self._receiver.receive(event)
        finally:
            with self._lock:
                if fetch.arrived_at is None and self._receiver.get(mm_hash) is not None:
                    fetch.arrived_at = self._clock()
                elif fetch.arrived_at is None and self._fetches.get(mm_hash) is fetch:
                    del self._fetches[mm_hash]  # failed, or its request has ended

    # ------------------------------------------------------------------ from the engine's thread

    def has(self, mm_hash: str) -> bool:
        """Whether :meth:`take` is worth calling."""
        return self._receiver.get(mm_hash) is not None or mm_hash in self._announced

    def take(self, mm_hash: str) -> Tensor | None:
        """The feature for a step; None where it is not here and did not come. Blocks while it is fetched."""
        feature = self._receiver.get(mm_hash)
        announcement = self._announced.get(mm_hash)
        if feature is None and announcement is not None:
            self.starved(mm_hash)
            asyncio.run_coroutine_threadsafe(announcement.fetched(), self._loop).result()
            feature = self._receiver.get(mm_hash)
        if feature is not None and (self._fetches or self._starved):
            self._used(mm_hash)
        return feature

    def starved(self, mm_hash: str) -> None:
        """Work that could be done otherwise waits for this feature."""
        with self._lock:
            if len(self._starved) >= _MAX_UNUSED:  # of requests that have ended without their feature
                self._starved.clear()
            self._starved.setdefault(mm_hash, self._clock())

    # ------------------------------------------------------------------ inside

    async def _receive_when_due(self, event: FeatureEvent) -> None:
        announcement = self._announced.setdefault(event.mm_hash, _Announcement())
        announcement.num_waiting += 1
        self._wake()
        try:
            await announcement.due.wait()
            await self._receiver.receive(event)
        finally:
            announcement.num_waiting -= 1
            if announcement.due.is_set() or not announcement.num_waiting:  # else others still wait to be asked
                if self._announced.get(event.mm_hash) is announcement:
                    del self._announced[event.mm_hash]
                announcement.done.set()

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
