"""Features come in whatever the order, requests never wait for each other's, and what is wrong is a miss."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from epd_serve.errors import InstanceFailed
from epd_serve.instance.feature_receiver import ORPHAN_S, FeatureForm, FeatureReceiver
from epd_serve.protocol import wire
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.transfer.feature_store import EmbeddedFeatureStore

WIDTH = 5
ITEM = wire.MediaRef("a" * 64, 4, 2)
OTHERS = [wire.MediaRef(f"{number}", 20, 1) for number in range(4)]


class Bench:
    """An encoder's store and a consumer's receiver. An image of w x h pixels has w * h tokens.

    Attributes:
        go_on: fetches wait for it. num_fetched: that have begun.
        timings: bytes, transmission and scheduling seconds of features that were used.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.num_fetched = 0
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self.timings: list[tuple[int, float, float]] = []
        self.transport = EmbeddedTransport(path="shm")
        self.store = EmbeddedFeatureStore(self.transport, 1 << 12)
        parts: dict[str, Any] = {
            "store": self,
            "engine": SimpleNamespace(wake=lambda: None),
            "metrics": SimpleNamespace(feature_used=lambda *timing: self.timings.append(timing)),
        }
        family: Any = SimpleNamespace(num_tokens=lambda item: item.width * item.height)
        form = FeatureForm(dtype="uint8", width=WIDTH, family=family)
        self.receiver = FeatureReceiver(**parts, form=form, capacity_bytes=200, clock=lambda: self.now)

    def fetch(self, event: wire.FeatureEvent) -> bytearray:
        self.num_fetched += 1
        self.begun.set()
        assert self.go_on.wait(300)
        return self.store.fetch(event)

    async def event(self, item: wire.MediaRef = ITEM, request_id: str = "r") -> wire.FeatureEvent:
        """A notice of a feature that is in the store, held for the request."""
        count = item.width * item.height
        data = memoryview(bytes(index % 251 for index in range(count * WIDTH)))
        feature = await self.store.put(item.mm_hash, data, [count, WIDTH], "uint8", request_id)
        assert feature is not None
        return msgspec.structs.replace(self.store.event(item.mm_hash, feature, request_id), item=item)

    async def announce(self, item: wire.MediaRef = ITEM, request_id: str = "r") -> None:
        await self.receiver.receive(await self.event(item, request_id))

    async def begin(self, event: wire.FeatureEvent) -> asyncio.Task[None]:
        """A fetch that waits for ``go_on``."""
        self.go_on.clear()
        task = asyncio.create_task(self.receiver.receive(event))
        assert await asyncio.to_thread(self.begun.wait, 300)
        return task

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """A context in which time passes by itself."""

        async def run() -> None:
            while True:
                await asyncio.sleep(0.01)
                self.now += 0.1

        task = asyncio.create_task(run())
        yield
        task.cancel()

    async def complete(self, request_id: str = "r", items: tuple[wire.MediaRef, ...] = (ITEM,)) -> None:
        await asyncio.wait_for(self.receiver.complete(request_id, [item.mm_hash for item in items]), 300)

    def end(self, *request_ids: str) -> None:
        """End the last requests: nothing is held."""
        for request_id in request_ids or ("r",):
            self.receiver.release(request_id)
        self.receiver.check_integrity()
        assert self.receiver.num_owners == 0


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    bench.go_on.set()
    bench.receiver.close()
    bench.transport.close()


async def test_requests_that_hold_half_of_their_features_do_not_wait_for_each_other(bench: Bench) -> None:
    items = {"a": OTHERS[:2], "b": OTHERS[2:]}
    for name, wanted in items.items():
        bench.receiver.expect(name, wanted)
        await bench.announce(wanted[0], name)
    async with bench.passing():
        await asyncio.wait_for(asyncio.gather(*(bench.announce(items[name][1], name) for name in items)), 300)
    for name, wanted in items.items():
        await bench.complete(name, (wanted[0], wanted[1]))
    bench.end("a", "b")


@pytest.mark.parametrize("known", [True, False], ids=["request known", "event first"])
@pytest.mark.parametrize(
    "corruption",
    [
        {"checksum": "0" * 64},
        {"offset": 8},
        {"dtype": "int8"},
        {"dtype": "float32", "shape": [2, WIDTH]},
        {"dtype": "Tensor"},
        {"shape": [WIDTH, 8]},
        {"shape": [40]},
        {"shape": [4, 2, WIDTH]},
        {"shape": [7, WIDTH], "nbytes": 35},
        {"nbytes": 39},
        {"offset": 1 << 40},
        {"region": None},
    ],
    ids=str,
)
async def test_a_feature_that_is_not_right_is_a_miss(
    bench: Bench, known: bool, corruption: dict[str, Any]
) -> None:
    if known:
        bench.receiver.expect("r", [ITEM])
    event = await bench.event()
    with pytest.raises(InstanceFailed):
        await bench.receiver.receive(msgspec.structs.replace(event, **corruption))
    assert not bench.receiver.has(ITEM.mm_hash)
    await bench.receiver.receive(event)
    assert bench.receiver.has(ITEM.mm_hash), "the right one is taken after it"
    bench.end()


async def test_an_event_that_comes_twice_or_too_late_changes_nothing(bench: Bench) -> None:
    bench.receiver.expect("r", [ITEM])
    event = await bench.event()
    await asyncio.gather(*(bench.receiver.receive(event) for _ in range(4)))
    await bench.receiver.receive(event)
    assert bench.receiver.num_owners == bench.num_fetched == 1
    bench.receiver.release("r")
    await bench.receiver.receive(event)
    bench.end()


async def test_a_feature_that_was_evicted_before_it_was_fetched_is_a_miss(bench: Bench) -> None:
    """Its place in the store belongs to another by then; encoded here, it is looked at, too."""
    bench.receiver.expect("r", [ITEM])
    event = await bench.event()
    bench.store.release("r", ITEM.mm_hash)
    for number in range(4):
        data = memoryview(bytes([number + 1]) * 1024)
        assert await bench.store.put(f"{number}", data, [1024], "uint8", "other") is not None
        bench.store.release("other", f"{number}")
    with pytest.raises(InstanceFailed):
        await bench.receiver.receive(event)
    with pytest.raises(InstanceFailed):
        await bench.receiver.take("r", ITEM, torch.zeros(8, WIDTH))
    await bench.receiver.take("r", ITEM, torch.zeros(8, WIDTH, dtype=torch.uint8))
    await bench.complete()
    bench.receiver.release("r")
    await bench.receiver.take("r", ITEM, torch.zeros(8, WIDTH, dtype=torch.uint8))
    bench.end()


async def test_a_feature_whose_request_never_comes_is_let_go(bench: Bench) -> None:
    await bench.announce()
    bench.now = ORPHAN_S - 1
    bench.receiver.expire()
    assert bench.receiver.num_owners == 1
    bench.now = ORPHAN_S
    bench.receiver.expire()
    assert bench.receiver.num_owners == 0
    await bench.announce(wire.MediaRef("b" * 64, 8, 5), "other")  # takes all the room
    bench.receiver.release("other")
    bench.receiver.expect("r", [ITEM])  # it comes after all
    assert not bench.receiver.has(ITEM.mm_hash)
    await bench.announce()
    await bench.complete()
    bench.end()


async def test_requests_that_need_one_feature_at_once_fetch_it_once(bench: Bench) -> None:
    bench.receiver.expect("waits", [ITEM])
    receiving = [await bench.begin(await bench.event())]
    receiving += [asyncio.create_task(bench.announce(request_id=name)) for name in "abc"]
    await asyncio.sleep(0)
    bench.go_on.set()
    await asyncio.gather(*receiving)
    await bench.complete("waits")
    assert (bench.num_fetched, bench.receiver.num_owners) == (1, 5)
    for name in "rabc":
        bench.receiver.release(name)
    async with bench.passing():
        for item in OTHERS:  # no room is left for a feature that nobody holds
            await bench.announce(item, "crowd")
    assert bench.receiver.has(ITEM.mm_hash), "who waits for a feature holds it"
    bench.end("waits", "crowd")


@pytest.mark.parametrize("end", ["fails", "cancelled"])
async def test_where_one_fetch_ends_badly_the_next_event_has_its_own(bench: Bench, end: str) -> None:
    event = await bench.event()
    broken = msgspec.structs.replace(event, checksum="0" * 64) if end == "fails" else event
    first = await bench.begin(broken)
    second = asyncio.create_task(bench.receiver.receive(msgspec.structs.replace(event, request_id="b")))
    await asyncio.sleep(0)
    if end == "cancelled":
        first.cancel()
    bench.go_on.set()
    (outcome,) = await asyncio.gather(first, return_exceptions=True)
    assert isinstance(outcome, InstanceFailed if end == "fails" else asyncio.CancelledError)
    await asyncio.wait_for(second, 300)
    assert bench.receiver.has(ITEM.mm_hash)
    bench.end("b")


@pytest.mark.parametrize("is_here", [True, False])
async def test_a_request_is_not_given_a_feature_of_another_length(bench: Bench, is_here: bool) -> None:
    """Whether that came before the request became known, or is being fetched."""
    receiving = await bench.begin(await bench.event(wire.MediaRef(ITEM.mm_hash, 3, 2), "early"))
    if is_here:
        bench.go_on.set()
        await receiving
        with pytest.raises(InstanceFailed):
            bench.receiver.expect("r", [ITEM])
    else:
        bench.receiver.expect("r", [ITEM])
        bench.go_on.set()
        with pytest.raises(InstanceFailed):
            await receiving
        assert not bench.receiver.has(ITEM.mm_hash)
    bench.end("r", "early")


@pytest.mark.parametrize(
    ("starved_at", "scheduling_s"),
    [(None, 9.0), (0.0, 0.0), (1.0, 0.0), (3.0, 2.0)],
    ids=["never", "before the event", "at the event", "on the way"],
)
async def test_the_engine_waited_for_what_is_exposed(
    bench: Bench, starved_at: float | None, scheduling_s: float
) -> None:
    """Announced at 1, here at 5, used at 10 or at once."""
    name, receiver = ITEM.mm_hash, bench.receiver
    if starved_at is not None and starved_at <= 1:
        bench.now = starved_at
        receiver.starved(name)
    bench.now = 1.0
    task = await bench.begin(await bench.event())
    if starved_at is not None and starved_at > 1:
        bench.now = starved_at
        receiver.starved(name)
        receiver.starved(name)
    assert not receiver.has(name) and receiver.use(name) is None
    bench.now = 5.0
    bench.go_on.set()
    await task
    bench.now = 10.0
    assert receiver.use(name) is not None and receiver.use(name) is not None
    assert bench.timings == [(8 * WIDTH, 4.0, scheduling_s)]
    bench.end()
