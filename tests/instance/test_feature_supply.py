"""Features as the engine sees them: fetched early or when due, and what their transfer cost is told exactly."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from epd_serve.errors import InstanceFailed
from epd_serve.instance.feature_supply import FeatureSupply, FetchTiming
from epd_serve.protocol.wire import FeatureEvent

EVENT = FeatureEvent(request_id="r", mm_hash="a", shape=[1], dtype="float32", nbytes=4, checksum="")


class Inbox:
    """Has what it was told to receive, when the test lets it through."""

    def __init__(self) -> None:
        self.features: dict[str, torch.Tensor] = {}
        self.asked = 0
        self.let_through = asyncio.Event()
        self.fails = False
        self.takes_in = True

    def get(self, mm_hash: str) -> torch.Tensor | None:
        return self.features.get(mm_hash)

    async def receive(self, event: FeatureEvent) -> None:
        self.asked += 1
        await self.let_through.wait()
        if self.fails:
            raise InstanceFailed("the checksum is wrong")
        if self.takes_in:
            self.features[event.mm_hash] = torch.zeros(1)


class Bench:
    def __init__(self, prefetch: Any) -> None:
        self.now = 0.0
        self.receiver = Inbox()
        self.timings: list[FetchTiming] = []
        self.supply = FeatureSupply(
            self.receiver,
            asyncio.get_running_loop(),
            prefetch,
            clock=lambda: self.now,
            wake=lambda: None,
            observe=self.timings.append,
        )

    async def announce(self) -> asyncio.Task[None]:
        task = asyncio.create_task(self.supply.receive(EVENT))
        await asyncio.sleep(0.01)
        return task

    async def arrive(self, task: asyncio.Task[None]) -> None:
        self.receiver.let_through.set()
        await task


def starve_at(bench: Bench, at: float) -> None:
    bench.now = at
    bench.supply.starved("a")


@pytest.mark.parametrize(
    ("starved_at", "scheduling_s", "exposed_s"),
    [(None, 9.0, 0.0), (0.0, 0.0, 4.0), (1.0, 0.0, 4.0), (3.0, 2.0, 2.0)],
    ids=["never", "before the event", "at the event", "on the way"],
)
async def test_what_is_exposed_is_what_the_engine_waited(
    starved_at: float | None, scheduling_s: float, exposed_s: float
) -> None:
    """Announced at 1, here at 5, used at 10 or at once."""
    bench = Bench("async")
    if starved_at is not None and starved_at <= 1:
        starve_at(bench, starved_at)
    bench.now = 1.0
    task = await bench.announce()
    if starved_at is not None and starved_at > 1:
        starve_at(bench, starved_at)
        bench.supply.starved("a")
    assert not bench.supply.has("a")
    assert bench.supply.take("a") is None
    bench.now = 5.0
    await bench.arrive(task)
    bench.now = 10.0
    assert bench.supply.has("a")
    assert bench.supply.take("a") is not None
    assert bench.supply.take("a") is not None
    (timing,) = bench.timings
    assert (timing.nbytes, timing.transmission_s) == (4, 4.0)
    assert timing.scheduling_s == scheduling_s
    assert timing.exposed_s == exposed_s
    assert timing.overlap_ratio == 1 - exposed_s / 4


async def test_a_feature_that_is_here_is_not_fetched_again() -> None:
    bench = Bench("async")
    bench.receiver.features["a"] = torch.zeros(1)
    await bench.arrive(await bench.announce())
    bench.supply.take("a")
    assert not bench.timings


async def test_what_was_fetched_and_went_unused_does_not_count_for_the_next_time() -> None:
    bench = Bench("async")
    await bench.arrive(await bench.announce())
    del bench.receiver.features["a"]  # evicted; its request has ended
    bench.now = 100.0
    await bench.arrive(await bench.announce())
    bench.now = 103.0
    assert bench.supply.take("a") is not None
    (timing,) = bench.timings
    assert (timing.transmission_s, timing.scheduling_s) == (0.0, 3.0)


async def test_a_wait_for_a_feature_that_was_encoded_here_is_not_held_against_the_next_fetch() -> None:
    bench = Bench("async")
    starve_at(bench, 1.0)
    bench.receiver.features["a"] = torch.zeros(1)  # not by an event
    assert bench.supply.take("a") is not None
    del bench.receiver.features["a"]
    bench.now = 5.0
    await bench.arrive(await bench.announce())
    bench.now = 6.0
    assert bench.supply.take("a") is not None
    (timing,) = bench.timings
    assert (timing.scheduling_s, timing.exposed_s) == (1.0, 0.0)


async def test_an_event_of_a_request_that_has_ended_leaves_nothing_to_be_timed() -> None:
    bench = Bench("async")
    bench.receiver.takes_in = False
    await bench.arrive(await bench.announce())
    assert not bench.supply._fetches


async def test_sync_fetches_when_the_engine_asks() -> None:
    bench = Bench("sync")
    tasks = [await bench.announce(), await bench.announce()]
    assert bench.receiver.asked == 0
    assert bench.supply.has("a"), "the engine may count on it"
    taking = asyncio.create_task(asyncio.to_thread(bench.supply.take, "a"))
    async with asyncio.timeout(300):
        while bench.receiver.asked < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    bench.now = 3.0
    bench.receiver.let_through.set()
    assert await taking is not None
    await asyncio.gather(*tasks)
    (timing,) = bench.timings
    assert timing.exposed_s == timing.transmission_s == 3.0


@pytest.mark.parametrize("end", ["fails", "cancelled"])
async def test_sync_does_not_wait_for_what_will_not_come(end: str) -> None:
    bench = Bench("sync")
    bench.receiver.fails = end == "fails"
    task = await bench.announce()
    taking = asyncio.create_task(asyncio.to_thread(bench.supply.take, "a"))
    await asyncio.sleep(0.05)
    if end == "fails":
        bench.receiver.let_through.set()
    else:
        task.cancel()
    assert await asyncio.wait_for(taking, 300) is None
    assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], BaseException)
    assert not bench.supply.has("a")


async def test_a_request_that_leaves_does_not_strand_others_with_the_same_image() -> None:
    bench = Bench("sync")
    leaving, staying = await bench.announce(), await bench.announce()
    leaving.cancel()
    await asyncio.sleep(0.01)
    assert bench.supply.has("a"), "nobody would ask for it any more"
    bench.receiver.let_through.set()
    feature = await asyncio.to_thread(bench.supply.take, "a")
    assert feature is not None
    await asyncio.wait_for(staying, 300)
    assert not bench.supply._announced
