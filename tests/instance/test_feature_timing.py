"""The time of a feature's transfer that the engine waited for is told exactly."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.ablations.features import FeaturesWhenDue
from epd_serve.instance.feature_receiver import FeatureForm, FeatureReceiver
from epd_serve.protocol.wire import FeatureEvent, MediaRef
from epd_serve.transfer.transport import TransferError

ITEM = MediaRef("a", 8, 8)
EVENT = FeatureEvent(request_id="r", mm_hash="a", shape=[1, 1], dtype="float32", nbytes=4, checksum="", item=ITEM)


class Bench:
    """A receiver whose fetch comes to its end when the test lets it through."""

    def __init__(self, kind: Callable[..., FeatureReceiver] = FeatureReceiver) -> None:
        self.now = 0.0
        self.num_asked = 0
        self.fails = False
        self.begun, self.let_through = threading.Event(), threading.Event()
        self.timings: list[tuple[int, float, float]] = []  # bytes, transmission, scheduling
        family: Any = SimpleNamespace(num_tokens=lambda item: 1)
        self.receiver = kind(
            self,
            SimpleNamespace(wake=lambda: None),
            SimpleNamespace(feature_used=lambda *timing: self.timings.append(timing)),
            FeatureForm(dtype="float32", width=1, family=family),
            capacity_bytes=1 << 20,
            timeout_s=60,
            clock=lambda: self.now,
        )

    def fetch(self, event: FeatureEvent) -> bytearray:
        self.num_asked += 1
        self.begun.set()
        assert self.let_through.wait(300)
        if self.fails:
            raise TransferError("the checksum is wrong")
        return bytearray(event.nbytes)

    async def announce(self, *, is_fetched: bool = True) -> asyncio.Task[None]:
        task = asyncio.create_task(self.receiver.receive(EVENT))
        if is_fetched:
            assert await asyncio.to_thread(self.begun.wait, 300)
        else:
            await asyncio.sleep(0.01)
        return task

    async def arrive(self) -> None:
        self.let_through.set()
        await self.receiver.receive(EVENT)

    def starve_at(self, at: float) -> None:
        self.now = at
        self.receiver.starved("a")


@pytest.mark.parametrize(
    ("starved_at", "scheduling_s"),
    [(None, 9.0), (0.0, 0.0), (1.0, 0.0), (3.0, 2.0)],
    ids=["never", "before the event", "at the event", "on the way"],
)
async def test_what_is_exposed_is_what_the_engine_waited(starved_at: float | None, scheduling_s: float) -> None:
    """Announced at 1, here at 5, used at 10 or at once."""
    bench = Bench()
    if starved_at is not None and starved_at <= 1:
        bench.starve_at(starved_at)
    bench.now = 1.0
    task = await bench.announce()
    if starved_at is not None and starved_at > 1:
        bench.starve_at(starved_at)
        bench.receiver.starved("a")
    assert not bench.receiver.has("a") and bench.receiver.use("a") is None
    bench.now = 5.0
    bench.let_through.set()
    await task
    bench.now = 10.0
    assert bench.receiver.has("a")
    assert bench.receiver.use("a") is not None and bench.receiver.use("a") is not None
    assert bench.timings == [(4, 4.0, scheduling_s)]


async def test_neither_an_unused_fetch_nor_an_old_wait_counts_for_the_next_fetch() -> None:
    bench = Bench()
    bench.starve_at(1.0)
    await bench.receiver.take("r", ITEM, torch.zeros(1, 1))
    await bench.arrive()
    assert bench.receiver.use("a") is not None
    assert not bench.timings and not bench.num_asked, "a feature that is here is not fetched again"
    for announced_at in (5.0, 100.0):  # the first is fetched and not used
        bench.receiver._cache.discard("a")
        bench.now = announced_at
        await bench.arrive()
    bench.now = 103.0
    assert bench.receiver.use("a") is not None
    assert bench.timings == [(4, 0.0, 3.0)]


async def test_an_event_of_a_request_that_has_ended_leaves_nothing_to_be_timed() -> None:
    bench = Bench()
    bench.receiver.release("r")
    await bench.arrive()
    assert not bench.receiver._fetched and not bench.num_asked


@pytest.mark.parametrize("end", ["here", "fails", "cancelled"])
async def test_what_is_fetched_when_due_is_waited_for_unless_it_will_not_come(end: str) -> None:
    bench = Bench(FeaturesWhenDue)
    bench.fails = end == "fails"
    tasks = [await bench.announce(is_fetched=False), await bench.announce(is_fetched=False)]
    assert bench.num_asked == 0
    assert bench.receiver.has("a"), "the engine may count on it"
    if end == "cancelled":
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not bench.receiver.has("a")
        return
    using = asyncio.create_task(asyncio.to_thread(bench.receiver.use, "a"))
    assert await asyncio.to_thread(bench.begun.wait, 300)
    bench.now = 3.0
    bench.let_through.set()
    feature = await asyncio.wait_for(using, 300)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (feature is None) == (end == "fails")
    assert bench.timings == ([] if bench.fails else [(4, 3.0, 0.0)])
