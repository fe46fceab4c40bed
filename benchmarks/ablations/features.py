"""Features that are fetched when a step is to be computed with them (EPD-Serve section 3.2, without prefetch)."""

from __future__ import annotations

import asyncio
from typing import Any

from torch import Tensor

from epd_serve.instance.feature_receiver import FeatureReceiver
from epd_serve.protocol.wire import FeatureEvent


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


class FeaturesWhenDue(FeatureReceiver):
    """The engine's thread waits while a feature is fetched."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._announced: dict[str, _Announcement] = {}

    def has(self, mm_hash: str) -> bool:
        return super().has(mm_hash) or mm_hash in self._announced

    def use(self, mm_hash: str) -> Tensor | None:
        announcement = self._announced.get(mm_hash)
        if announcement is not None and not super().has(mm_hash):
            self.starved(mm_hash)
            asyncio.run_coroutine_threadsafe(announcement.fetched(), self._loop).result()
        return super().use(mm_hash)

    async def _receive(self, event: FeatureEvent, announced_at: float) -> None:
        if super().has(event.mm_hash):
            return await super()._receive(event, announced_at)
        self._loop = asyncio.get_running_loop()
        announcement = self._announced.setdefault(event.mm_hash, _Announcement())
        announcement.num_waiting += 1
        for changed in self._wanted.values():  # an announced feature counts as here
            changed.set()
        self.engine.wake()
        try:
            await announcement.due.wait()
            await super()._receive(event, announced_at)
        finally:
            announcement.num_waiting -= 1
            if announcement.due.is_set() or not announcement.num_waiting:  # else others still wait to be asked
                if self._announced.get(event.mm_hash) is announcement:
                    del self._announced[event.mm_hash]
                announcement.done.set()
