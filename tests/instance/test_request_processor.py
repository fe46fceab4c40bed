"""Preparations: kinds apart, quick apart from slow, in order, and no place lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
from program import until

from epd_serve.errors import PREPARATION_FULL, Overloaded
from epd_serve.instance.text.request_processor import SLOW_S, Kind, RequestProcessor
from epd_serve.telemetry.span import SpanStream


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
    processor = RequestProcessor(1, queue_timeout_s=60, spans=SpanStream())
    yield processor
    gate.go.set()
    await processor.close()


KINDS: tuple[Kind, ...] = ("text", "media", "grammar")


@pytest.mark.parametrize("kind", KINDS)
async def test_no_quick_item_waits_for_slow_or_other_ones(
    processor: RequestProcessor, gate: Gate, kind: Kind
) -> None:
    slow = [asyncio.create_task(processor.run(kind, 9.0, gate.work, "slow")) for _ in range(5)]
    slow += [
        asyncio.create_task(processor.run(other, 0.0, gate.work, "other"))
        for other in KINDS
        if other != kind
        for _ in range(2)
    ]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(processor.run(kind, SLOW_S, lambda: "quick"), 300) == "quick"
    gate.go.set()
    await asyncio.gather(*slow)


async def test_items_are_served_as_they_came(processor: RequestProcessor, gate: Gate) -> None:
    tasks = [asyncio.create_task(processor.run("media", 0.05, gate.work, str(number))) for number in range(5)]
    await until(lambda: processor.num_waiting == 4)
    gate.go.set()
    assert await asyncio.gather(*tasks) == gate.done == ["0", "1", "2", "3", "4"]


async def test_an_item_waits_no_longer_than_it_may() -> None:
    processor = RequestProcessor(1, queue_timeout_s=0.01, spans=SpanStream())
    async with processor.place("text", 0.0):
        with pytest.raises(Overloaded) as refused:
            async with processor.place("text", 0.0):
                pass
    assert refused.value.code == PREPARATION_FULL and processor.num_waiting == 0
    assert await asyncio.wait_for(processor.run("text", 0.0, lambda: "next"), 300) == "next"


async def test_an_item_that_turns_out_to_be_slow_leaves_its_place(processor: RequestProcessor) -> None:
    async with processor.place("text", 1.0) as other, processor.place("text", 0.0) as place:
        changing = asyncio.create_task(place.become_slow())
        assert await asyncio.wait_for(processor.run("text", 0.0, lambda: "quick"), 300) == "quick"
        other.leave()
        await changing
        assert place.is_slow
    async with processor.place("text", 1.0), processor.place("text", 0.0):
        assert processor.num_waiting == 0, "all places are free again"


async def test_a_place_is_free_when_the_thread_of_its_item_has_ended(
    processor: RequestProcessor, gate: Gate
) -> None:
    tasks = [asyncio.create_task(processor.run("text", 0.0, gate.work, str(number))) for number in range(3)]
    await until(lambda: processor.num_waiting == 2)
    for task in tasks[:2]:  # one is at work, the other waits
        task.cancel()
    await asyncio.wait(tasks[:2])
    assert processor.num_waiting == 1
    gate.go.set()
    assert await tasks[2] == "2" and gate.done == ["0", "2"]
