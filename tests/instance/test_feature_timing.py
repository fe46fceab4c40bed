"""Features as the engine sees them: fetched early or when due, and what their transfer cost is told exactly."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.ablations.features import FeaturesWhenDue
from epd_serve.instance.feature_receiver import FeatureForm, FeatureReceiver, FetchTiming
from epd_serve.protocol.wire import FeatureEvent, MediaRef
from epd_serve.transfer.transport import TransferError

EVENT = FeatureEvent(
    request_id="r", mm_hash="a", shape=[1, 1], dtype="float32", nbytes=4, checksum="", item=MediaRef("a", 8, 8)
)


class Bench:
    """A receiver whose fetch comes to its end when the test lets it through."""

    def __init__(self, kind: Callable[..., FeatureReceiver] = FeatureReceiver) -> None:
        self.now = 0.0
        self.asked = 0
        self.fails = False
        self.let_through = threading.Event()
        self.timings: list[FetchTiming] = []
        family: Any = SimpleNamespace(num_tokens=lambda item: 1)
        self.receiver = kind(
            self,
            SimpleNamespace(wake=lambda: None),
            SimpleNamespace(feature_used=self.timings.append),
            FeatureForm(dtype="float32", width=1, family=family),
            capacity_bytes=1 << 20,
            timeout_s=60,
            clock=lambda: self.now,
        )

    def fetch(self, event: FeatureEvent) -> bytearray:
        self.asked += 1
        assert self.let_through.wait(300)
        if self.fails:
            raise TransferError("the checksum is wrong")
        return bytearray(event.nbytes)

    async def announce(self) -> asyncio.Task[None]:
        task = asyncio.create_task(self.receiver.receive(EVENT))
        await asyncio.sleep(0.01)
        return task

    async def arrive(self, task: asyncio.Task[None]) -> None:
        self.let_through.set()
        await task

    async def encode_here(self) -> None:
        await self.receiver.take("r", MediaRef("a", 8, 8), torch.zeros(1, 1))

    def evict(self) -> None:
        self.receiver._cache.discard("a")

    def starve_at(self, at: float) -> None:
        self.now = at
        self.receiver.starved("a")


@pytest.mark.parametrize(
    ("starved_at", "scheduling_s", "exposed_s"),
    [(None, 9.0, 0.0), (0.0, 0.0, 4.0), (1.0, 0.0, 4.0), (3.0, 2.0, 2.0)],
    ids=["never", "before the event", "at the event", "on the way"],
)
async def test_what_is_exposed_is_what_the_engine_waited(
    starved_at: float | None, scheduling_s: float, exposed_s: float
) -> None:
    """Announced at 1, here at 5, used at 10 or at once."""
    bench = Bench()
    if starved_at is not None and starved_at <= 1:
        bench.starve_at(starved_at)
    bench.now = 1.0
    task = await bench.announce()
    if starved_at is not None and starved_at > 1:
        bench.starve_at(starved_at)
        bench.receiver.starved("a")
    assert not bench.receiver.has("a")
    assert bench.receiver.use("a") is None
    bench.now = 5.0
    await bench.arrive(task)
    bench.now = 10.0
    assert bench.receiver.has("a")
    assert bench.receiver.use("a") is not None
    assert bench.receiver.use("a") is not None
    (timing,) = bench.timings
    assert (timing.nbytes, timing.transmission_s) == (4, 4.0)
    assert timing.scheduling_s == scheduling_s
    assert timing.exposed_s == exposed_s
    assert timing.overlap_ratio == 1 - exposed_s / 4


async def test_a_feature_that_is_here_is_not_fetched_again() -> None:
    bench = Bench()
    await bench.encode_here()
    await bench.arrive(await bench.announce())
    bench.receiver.use("a")
    assert not bench.timings and not bench.asked


async def test_what_was_fetched_and_went_unused_does_not_count_for_the_next_time() -> None:
    bench = Bench()
    await bench.arrive(await bench.announce())
    bench.evict()  # its request has ended
    bench.now = 100.0
    await bench.arrive(await bench.announce())
    bench.now = 103.0
    assert bench.receiver.use("a") is not None
    (timing,) = bench.timings
    assert (timing.transmission_s, timing.scheduling_s) == (0.0, 3.0)


async def test_a_wait_for_a_feature_that_was_encoded_here_is_not_held_against_the_next_fetch() -> None:
    bench = Bench()
    bench.starve_at(1.0)
    await bench.encode_here()
    assert bench.receiver.use("a") is not None
    bench.evict()
    bench.now = 5.0
    await bench.arrive(await bench.announce())
    bench.now = 6.0
    assert bench.receiver.use("a") is not None
    (timing,) = bench.timings
    assert (timing.scheduling_s, timing.exposed_s) == (1.0, 0.0)


async def test_an_event_of_a_request_that_has_ended_leaves_nothing_to_be_timed() -> None:
    bench = Bench()
    bench.receiver.release("r")
    await bench.arrive(await bench.announce())
    assert not bench.receiver._fetched and not bench.asked


async def test_what_is_fetched_when_due_is_fetched_when_the_engine_asks() -> None:
    bench = Bench(FeaturesWhenDue)
    tasks = [await bench.announce(), await bench.announce()]
    assert bench.asked == 0
    assert bench.receiver.has("a"), "the engine may count on it"
    using = asyncio.create_task(asyncio.to_thread(bench.receiver.use, "a"))
    async with asyncio.timeout(300):
        while not bench.asked:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    bench.now = 3.0
    bench.let_through.set()
    assert await using is not None
    await asyncio.gather(*tasks)
    (timing,) = bench.timings
    assert timing.exposed_s == timing.transmission_s == 3.0


@pytest.mark.parametrize("end", ["fails", "cancelled"])
async def test_what_is_fetched_when_due_is_not_waited_for_when_it_will_not_come(end: str) -> None:
    bench = Bench(FeaturesWhenDue)
    bench.fails = end == "fails"
    task = await bench.announce()
    using = asyncio.create_task(asyncio.to_thread(bench.receiver.use, "a"))
    await asyncio.sleep(0.05)
    if end == "cancelled":
        task.cancel()
        assert await asyncio.wait_for(using, 300) is None
    bench.let_through.set()
    assert await asyncio.wait_for(using, 300) is None
    assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], BaseException)
    assert not bench.receiver.has("a")


async def test_a_request_that_leaves_does_not_strand_others_with_the_same_image() -> None:
    bench = Bench(FeaturesWhenDue)
    leaving, staying = await bench.announce(), await bench.announce()
    leaving.cancel()
    await asyncio.sleep(0.01)
    assert bench.receiver.has("a"), "nobody would ask for it any more"
    bench.let_through.set()
    feature = await asyncio.to_thread(bench.receiver.use, "a")
    assert feature is not None
    await asyncio.wait_for(staying, 300)
    assert not bench.receiver._announced  # type: ignore[attr-defined]
