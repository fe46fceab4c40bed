"""The parent's service to its workers: it passes on what concerns all, and adds up what all have counted."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from epd_serve.rpc.link import LinkClosed
from epd_serve.telemetry.merged import Family, cumulative, exposition, merge
from proxy.observe.metrics import GROWING_GAUGES, SUMMED_GAUGES
from proxy.workers.channel import CallFailed, Channel
from proxy.workers.crew import ANSWER_S
from proxy.workers.messages import Asked, Change, Shared, TakenOver


class Hub:
    """Knows the workers that have joined by their channels.

    Attributes:
        shared: what those that join must know.
    """

    def __init__(self) -> None:
        self.shared = Shared()
        self._channels: dict[int, Channel] = {}
        self._had_joined: set[int] = set()
        self._counted: dict[int, list[Family]] = {}
        self._retired: list[Family] = []

    def connect(self, index: int, joined: asyncio.Event) -> Channel:
        """The parent's side of the channel to worker ``index``, not yet open; ``joined`` is set when it serves."""

        async def join(_: bytes) -> bytes:
            self.shared.expire(time.monotonic())
            known = msgspec.structs.replace(self.shared, again=index in self._had_joined)
            self._had_joined.add(index)
            self._channels[index] = channel
            joined.set()
            return msgspec.msgpack.encode(known)

        channel = Channel(
            {
                "join": join,
                "share": partial(self._share, index),
                "ask": partial(self._ask, index),
                "metrics": self._metrics,
            }
        )
        return channel

    def left(self, index: int) -> None:
        """The worker has ended. What it had counted when it was last asked stays in the sums, so that no counter
        that anybody has seen ever falls."""
        self._channels.pop(index, None)
        if (counted := self._counted.pop(index, None)) is not None:
            self._retired = merge([self._retired, cumulative(counted, GROWING_GAUGES)], GROWING_GAUGES)

    def tell(self, name: str) -> None:
        """All of them."""
        for channel in self._channels.values():
            channel.tell(name)

    async def _share(self, index: int, body: bytes) -> bytes:
        change = msgspec.msgpack.decode(body, type=Change)
        self.shared.apply(change, time.monotonic())
        unconfirmed: list[int] = []
        if not isinstance(change, TakenOver):
            _, unconfirmed = await self._call_all("change", change, but=index)
        return msgspec.msgpack.encode(unconfirmed)

    async def _ask(self, index: int, body: bytes) -> bytes:
        answers, silent = await self._call_all("show", msgspec.msgpack.decode(body), but=index)
        return msgspec.msgpack.encode(Asked(list(answers.values()), silent))

    async def _metrics(self, _: bytes) -> bytes:
        answers, _silent = await self._call_all("show", "metrics")
        for index, answer in answers.items():
            if index in self._channels:  # it may have ended since
                self._counted[index] = msgspec.msgpack.decode(answer, type=list[Family])
        families = merge([self._retired, *self._counted.values()], SUMMED_GAUGES)
        return msgspec.msgpack.encode(exposition(families))

    async def _call_all(
        self, name: str, argument: Any, *, but: int | None = None
    ) -> tuple[dict[int, bytes], list[int]]:
        """The answers by worker, of those that answer in time, and which others live on without."""
        asked = {index: channel for index, channel in self._channels.items() if index != but}
        answers: dict[int, bytes] = {}

        async def call(index: int, channel: Channel) -> None:
            with suppress(LinkClosed, CallFailed, TimeoutError):
                answers[index] = await channel.call(name, argument, timeout_s=ANSWER_S)

        async with asyncio.TaskGroup() as calling:
            for index, channel in asked.items():
                calling.create_task(call(index, channel))
        silent = [
            index
            for index, channel in asked.items()
            if index not in answers and self._channels.get(index) is channel  # the next one knows what is shared
        ]
        return answers, silent
