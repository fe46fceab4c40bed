"""Preparations: text beside images, long beside short, bounded, and nothing done for those who have left."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator

import pytest

from epd_serve.errors import InvalidRequest, Unavailable
from epd_serve.instance.text.request_processor import LONG_S, Kind, RequestProcessor
from epd_serve.telemetry.span import Span


class Gate:
    """Work that ends when it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.done: list[str] = []

    def work(self, name: str) -> str:
        self.go.wait(300)
        self.done.append(name)
        return name


@pytest.fixture
async def gate() -> AsyncIterator[Gate]:
    gate = Gate()
    yield gate
    gate.go.set()


@pytest.fixture
async def processor(gate: Gate) -> AsyncIterator[RequestProcessor]:
    processor = RequestProcessor(1, queue_timeout_s=60, max_waiting=3)
    yield processor
    gate.go.set()
    await processor.close()


async def settle(processor: RequestProcessor, num_waiting: int) -> None:
    deadline = time.monotonic() + 30
    while processor.num_waiting != num_waiting:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


async def test_short_text_does_not_wait_for_a_large_image(processor: RequestProcessor, gate: Gate) -> None:
    large = asyncio.create_task(processor.run("media", 0.09, gate.work, "image"))
    await asyncio.sleep(0.01)
    assert await processor.run("text", 0.0, lambda: threading.current_thread().name) == "text_0"
    assert not large.done()
    gate.go.set()
    assert await large == "image"


async def test_items_are_served_as_they_came(processor: RequestProcessor, gate: Gate) -> None:
    tasks = []
    for name, cost_s in (("running", 0.05), ("long", 0.1), ("short", 0.01), ("late", 0.05)):
        tasks.append(asyncio.create_task(processor.run("media", cost_s, gate.work, name)))
        await asyncio.sleep(0)
    gate.go.set()
    await asyncio.gather(*tasks)
    assert gate.done == ["running", "long", "short", "late"]


async def test_who_leaves_frees_a_place_and_is_not_processed(processor: RequestProcessor, gate: Gate) -> None:
    tasks = [asyncio.create_task(processor.run("media", 0.05, gate.work, str(i))) for i in range(4)]
    await settle(processor, 3)
    with pytest.raises(Unavailable, match="3 requests wait") as refused:
        await processor.run("media", 0.05, gate.work, "one too many")
    assert refused.value.code == "preparation_full"
    tasks[0].cancel()  # at work: its thread stays taken until it ends
    tasks[2].cancel()
    await settle(processor, 2)
    later = asyncio.create_task(processor.run("media", 0.05, gate.work, "later"))
    await settle(processor, 3)
    gate.go.set()
    results = await asyncio.gather(*tasks, later, return_exceptions=True)
    assert [str(r) for r in results] == ["", "1", "", "3", "later"]
    assert gate.done == ["0", "1", "3", "later"]


async def test_a_wait_has_an_end(gate: Gate) -> None:
    processor = RequestProcessor(1, queue_timeout_s=0.05)
    first = asyncio.create_task(processor.run("text", 0.05, gate.work, "first"))
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match=r"within 0\.05 s"):
        await processor.run("text", 0.05, gate.work, "second")
    assert processor.num_waiting == 0
    gate.go.set()
    await first
    assert await processor.run("text", 0.05, gate.work, "third") == "third"
    assert gate.done == ["first", "third"]
    await processor.close()


async def test_a_failure_is_the_callers_and_what_was_done_is_told() -> None:
    told: list[Span] = []
    processor = RequestProcessor(2, queue_timeout_s=60, put=told.append)

    def broken() -> None:
        raise InvalidRequest("the image is broken")

    for _ in range(3):
        with pytest.raises(InvalidRequest, match="broken"):
            await processor.run("media", 0.0, broken)
    await processor.run("media", 0.0, time.sleep, 0.02)
    assert [span.name for span in told] == ["media"] * 4
    assert float(told[-1].attributes["waited_s"]) >= 0 and told[-1].end_s - told[-1].start_s >= 0.02
    await processor.close()


async def test_a_place_that_comes_with_a_cancellation_is_given_on(processor: RequestProcessor, gate: Gate) -> None:
    """Many cancellations at every moment: afterwards all threads are free again."""
    gate.go.set()
    for round_ in range(200):
        tasks = [asyncio.create_task(processor.run("media", 0.0, gate.work, "x")) for _ in range(3)]
        for _ in range(round_ % 7):
            await asyncio.sleep(0)
        for task in tasks[: 1 + round_ % 3]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert await asyncio.wait_for(processor.run("media", 0.0, gate.work, "y"), 300) == "y"


@pytest.mark.parametrize("kind", ["text", "media"])
async def test_no_short_item_waits_for_a_long_one(processor: RequestProcessor, gate: Gate, kind: Kind) -> None:
    """However many long ones there are."""
    long = [asyncio.create_task(processor.run(kind, 9.0, gate.work, str(number))) for number in range(3)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(processor.run(kind, LONG_S, lambda: "short"), 300) == "short"
    assert not gate.done
    gate.go.set()
    await asyncio.gather(*long)


async def test_an_item_that_turns_out_to_be_long_leaves_its_place(processor: RequestProcessor) -> None:
    """While there is room beside the others; else it gives the place up, and waits until there is."""
    aside, turns, may_end = list[bool](), list[str](), asyncio.Event()

    async def slow(name: str) -> None:
        async with processor.place("media", 0.0) as place:
            aside.append(place.step_aside())
            if not place.is_aside:
                await place.wait_aside()
            turns.append(name)
            await may_end.wait()

    tasks = []
    for name in "abcd":
        tasks.append(asyncio.create_task(slow(name)))
        await asyncio.sleep(0)
        assert await asyncio.wait_for(processor.run("media", 0.0, lambda: "short"), 300) == "short"
    assert (aside, turns) == ([True, True, False, False], ["a", "b"])
    tasks[2].cancel()
    await asyncio.gather(tasks[2], return_exceptions=True)
    may_end.set()
    await asyncio.gather(tasks[0], tasks[1], tasks[3])
    assert turns == ["a", "b", "d"]
    async with processor.place("media", 1.0), processor.place("media", 1.0), processor.place("media", 0.0):
        assert processor.num_waiting == 0, "all places are free again"
