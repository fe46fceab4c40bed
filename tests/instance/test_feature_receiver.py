"""Features come in whatever the order, requests never wait for each other's, and what is wrong is a miss."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from epd_serve.errors import InstanceFailed
from epd_serve.instance.feature_receiver import ORPHAN_S, FeatureForm, FeatureReceiver
from epd_serve.instance.metrics import InstanceMetrics
from epd_serve.protocol import wire
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.transfer.feature_store import EmbeddedFeatureStore

WIDTH = 5


@dataclass
class Bench:
    """An encoder's store and a consumer's receiver. An image of w x h pixels has w * h tokens."""

    transport: EmbeddedTransport = field(default_factory=lambda: EmbeddedTransport(path="shm"))
    now: float = 0.0

    def __post_init__(self) -> None:
        self.store = EmbeddedFeatureStore(self.transport, 1 << 12)
        self.receiver = self.new_inbox(200, time.monotonic)

    def new_inbox(self, capacity_bytes: int, clock: Any, store: Any = None) -> FeatureReceiver:
        family: Any = SimpleNamespace(num_tokens=lambda item: item.width * item.height)
        engine: Any = SimpleNamespace(wake=lambda: None)
        return FeatureReceiver(
            store or self.store,
            engine,
            InstanceMetrics(),
            FeatureForm(dtype="uint8", width=WIDTH, family=family),
            capacity_bytes=capacity_bytes,
            timeout_s=60,
            clock=clock,
        )

    async def event(
        self, item: wire.MediaRef, request_id: str, num_tokens: int | None = None
    ) -> wire.FeatureEvent:
        """A notice of a feature that is in the store, held for the request."""
        count = item.width * item.height if num_tokens is None else num_tokens
        data = memoryview(bytes(index % 251 for index in range(count * WIDTH)))
        feature = await self.store.put(item.mm_hash, data, [count, WIDTH], "uint8", request_id)
        assert feature is not None
        event = self.store.event(item.mm_hash, feature, request_id)
        return msgspec.structs.replace(event, item=item)

    async def announce(self, item: wire.MediaRef, request_id: str) -> None:
        await self.receiver.receive(await self.event(item, request_id))

    def check_empty(self) -> None:
        self.receiver.check_integrity()
        assert self.receiver.num_owners == 0


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    bench.receiver.close()
    bench.transport.close()


async def test_requests_that_hold_half_of_their_features_do_not_wait_for_each_other(bench: Bench) -> None:
    items = {name: [wire.MediaRef(f"{name}{i}", 20, 1) for i in range(2)] for name in ("a", "b")}
    for name, wanted in items.items():
        bench.receiver.expect(name, wanted)
    for name, wanted in items.items():
        await bench.announce(wanted[0], name)
    await asyncio.wait_for(asyncio.gather(*(bench.announce(items[name][1], name) for name in ("a", "b"))), 300)
    for name, wanted in items.items():
        await asyncio.wait_for(bench.receiver.complete(name, wanted), 300)
        bench.receiver.check_integrity()
        bench.receiver.release(name)
    bench.check_empty()


ITEM = wire.MediaRef("a" * 64, 4, 2)


@pytest.mark.parametrize("known", [True, False], ids=["request known", "event first"])
@pytest.mark.parametrize(
    ("corruption", "words"),
    [
        ({"checksum": "0" * 64}, "checksum"),
        ({"offset": 8}, "checksum"),
        ({"dtype": "int8"}, "int8"),
        ({"dtype": "float32", "shape": [2, WIDTH]}, "float32"),
        ({"dtype": "Tensor"}, "Tensor"),
        ({"shape": [WIDTH, 8]}, r"\[5, 8\]"),
        ({"shape": [40]}, r"\[40\]"),
        ({"shape": [4, 2, WIDTH]}, r"\[4, 2, 5\]"),
        ({"shape": [7, WIDTH], "nbytes": 35}, r"\[7, 5\]"),
        ({"nbytes": 39}, "checksum"),
        ({"offset": 1 << 40}, "outside region"),
        ({"region": None}, "does not use"),
    ],
)
async def test_a_feature_that_is_not_as_it_must_be_is_a_miss(
    bench: Bench, known: bool, corruption: dict[str, Any], words: str
) -> None:
    if known:
        bench.receiver.expect("r", [ITEM])
    event = await bench.event(ITEM, "r")
    with pytest.raises(InstanceFailed, match=words):
        await bench.receiver.receive(msgspec.structs.replace(event, **corruption))
    assert not bench.receiver.has(ITEM.mm_hash)
    await bench.receiver.receive(event)
    assert bench.receiver.has(ITEM.mm_hash), "the right one is taken after it"
    bench.receiver.release("r")
    bench.check_empty()


async def test_a_feature_of_another_length_that_came_first_fails_the_request(bench: Bench) -> None:
    await bench.announce(wire.MediaRef(ITEM.mm_hash, 3, 2), "early")
    with pytest.raises(InstanceFailed, match=r"\[6, 5\]"):
        bench.receiver.expect("r", [ITEM])
    bench.receiver.release("r")
    bench.receiver.release("early")
    bench.check_empty()


async def test_an_event_that_comes_twice_or_too_late_changes_nothing(bench: Bench) -> None:
    bench.receiver.expect("r", [ITEM])
    event = await bench.event(ITEM, "r")
    await asyncio.gather(*(bench.receiver.receive(event) for _ in range(4)))
    await bench.receiver.receive(event)
    assert bench.receiver.num_owners == 1
    bench.receiver.release("r")
    await bench.receiver.receive(event)
    bench.check_empty()


async def test_a_feature_that_was_evicted_before_it_was_fetched_is_a_miss(bench: Bench) -> None:
    """Its place in the store belongs to another by then."""
    bench.receiver.expect("r", [ITEM])
    event = await bench.event(ITEM, "r")
    bench.store.release("r", ITEM.mm_hash)
    for number in range(4):
        data = memoryview(bytes([number + 1]) * 1024)
        assert await bench.store.put(f"{number}", data, [1024], "uint8", "other") is not None
        bench.store.release("other", f"{number}")
    with pytest.raises(InstanceFailed, match="checksum"):
        await bench.receiver.receive(event)
    await bench.receiver.take("r", ITEM, torch.zeros(8, WIDTH, dtype=torch.uint8))
    await asyncio.wait_for(bench.receiver.complete("r", [ITEM]), 300)
    bench.receiver.release("r")
    bench.check_empty()


async def test_a_feature_encoded_here_is_looked_at_too(bench: Bench) -> None:
    bench.receiver.expect("r", [ITEM])
    with pytest.raises(InstanceFailed, match="float32"):
        await bench.receiver.take("r", ITEM, torch.zeros(8, WIDTH))
    await bench.receiver.take("r", ITEM, torch.ones(8, WIDTH, dtype=torch.uint8))
    bench.receiver.release("r")
    await bench.receiver.take("r", ITEM, torch.ones(8, WIDTH, dtype=torch.uint8))
    bench.check_empty()


async def test_a_feature_whose_request_never_comes_is_let_go(bench: Bench) -> None:
    bench.receiver = bench.new_inbox(200, lambda: bench.now)
    await bench.announce(ITEM, "r")
    bench.now = ORPHAN_S - 1
    bench.receiver.expire()
    assert bench.receiver.num_owners == 1
    bench.now = ORPHAN_S
    bench.receiver.expire()
    bench.check_empty()


class SlowFetch:
    """Reads of a store, let through one by one."""

    def __init__(self, bench: Bench) -> None:
        self.num_begun = 0
        self._begun = threading.Event()
        self.let_through = threading.Event()
        self._fetch = bench.store.fetch
        bench.receiver.close()
        bench.receiver = bench.new_inbox(200, time.monotonic, self)

    def fetch(self, event: wire.FeatureEvent) -> bytearray:
        self.num_begun += 1
        self._begun.set()
        assert self.let_through.wait(300)
        return self._fetch(event)

    async def begun(self) -> None:
        assert await asyncio.to_thread(self._begun.wait, 300)


async def test_requests_that_need_one_feature_at_once_fetch_it_once(bench: Bench) -> None:
    fetch = SlowFetch(bench)
    names = [f"r{number}" for number in range(4)]
    receiving = [asyncio.create_task(bench.announce(ITEM, name)) for name in names]
    await fetch.begun()
    receiving.append(asyncio.create_task(bench.announce(ITEM, "later")))
    await asyncio.sleep(0.05)
    fetch.let_through.set()
    await asyncio.gather(*receiving)
    assert fetch.num_begun == 1
    assert bench.receiver.num_owners == 5
    for name in [*names, "later"]:
        bench.receiver.release(name)
    bench.check_empty()


@pytest.mark.parametrize("end", ["fails", "cancelled"])
async def test_where_one_fetch_ends_badly_the_next_event_has_its_own(bench: Bench, end: str) -> None:
    fetch = SlowFetch(bench)
    event = await bench.event(ITEM, "a")
    broken = msgspec.structs.replace(event, checksum="0" * 64) if end == "fails" else event
    first = asyncio.create_task(bench.receiver.receive(broken))
    await fetch.begun()
    second = asyncio.create_task(bench.receiver.receive(msgspec.structs.replace(event, request_id="b")))
    await asyncio.sleep(0)
    if end == "cancelled":
        first.cancel()
    fetch.let_through.set()
    (outcome,) = await asyncio.gather(first, return_exceptions=True)
    assert isinstance(outcome, InstanceFailed if end == "fails" else asyncio.CancelledError)
    await asyncio.wait_for(second, 300)
    assert bench.receiver.has(ITEM.mm_hash)
    bench.receiver.release("b")
    bench.check_empty()


async def test_a_request_that_becomes_known_during_the_fetch_is_not_given_a_wrong_length(bench: Bench) -> None:
    fetch = SlowFetch(bench)
    receiving = asyncio.create_task(bench.announce(wire.MediaRef(ITEM.mm_hash, 3, 2), "r"))
    await fetch.begun()
    bench.receiver.expect("r", [ITEM])
    fetch.let_through.set()
    with pytest.raises(InstanceFailed, match=r"\[6, 5\] uint8.* 4x2 pixels has \[8, 5\]"):
        await receiving
    assert not bench.receiver.has(ITEM.mm_hash)
    bench.receiver.release("r")
    bench.check_empty()


async def test_a_request_that_comes_after_its_feature_was_let_go_gets_it_again(bench: Bench) -> None:
    bench.receiver = bench.new_inbox(200, lambda: bench.now)
    await bench.announce(ITEM, "r")
    bench.now = ORPHAN_S
    bench.receiver.expire()
    other = wire.MediaRef("b" * 64, 8, 5)
    await bench.announce(other, "other")  # takes all the room
    bench.receiver.release("other")
    bench.receiver.expect("r", [ITEM])
    assert not bench.receiver.has(ITEM.mm_hash)
    await bench.announce(ITEM, "r")
    await asyncio.wait_for(bench.receiver.complete("r", [ITEM]), 300)
    bench.receiver.release("r")
    await bench.announce(ITEM, "r")
    bench.check_empty()


async def test_who_waits_for_a_feature_holds_it_when_another_request_brings_it(bench: Bench) -> None:
    """Else its deadline would be over with the feature's arrival, and the feature could still go."""
    bench.receiver.expect("waits", [ITEM])
    await bench.announce(ITEM, "brings")
    await asyncio.wait_for(bench.receiver.complete("waits", [ITEM]), 300)
    bench.receiver.release("brings")
    for number in range(4):
        await bench.announce(wire.MediaRef(f"{number}", 20, 1), "crowd")
    assert bench.receiver.has(ITEM.mm_hash)
    bench.receiver.release("crowd")
    bench.receiver.release("waits")
    bench.check_empty()
