"""One contract for every feature store: what is held stays, what is fetched is right, what is gone is a miss."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from chips import CHIP
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from mooncake_master import Master
from transports import kinds, make_transport, mooncake_options

from device.registry import get_device
from epd_serve.engine.device_features import SLOT_BYTES, DeviceFeatureStore
from epd_serve.protocol.wire import FeatureEvent
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.transfer.feature_store import EmbeddedFeatureStore, FeatureStore
from epd_serve.transfer.mooncake.engine import StoreClient
from epd_serve.transfer.mooncake.store import MooncakeFeatureStore
from epd_serve.transfer.transport import TransferError

CAPACITY = 16 * 1024
KEYS = st.integers(0, 7)
OWNERS = st.sampled_from(["r0", "r1", "r2"])
NBYTES = (1000, 2000, 3000, 7000)


def content(key: int) -> bytes:
    return bytes([key + 1]) * NBYTES[key % len(NBYTES)]


class StoreContract(RuleBasedStateMachine):
    make_pair: Callable[[], tuple[FeatureStore, FeatureStore]]
    runner: asyncio.Runner
    num_examples = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).num_examples += 1
        self.store, self.reader = self.make_pair()
        self.held: dict[tuple[str, int], FeatureEvent] = {}
        self.announced: dict[int, FeatureEvent] = {}

    def name(self, key: int) -> str:
        """A key that no other example has."""
        return f"{self.num_examples:04d}-{key}".ljust(64, "0")

    @rule(key=KEYS, owner=OWNERS)
    def put(self, key: int, owner: str) -> None:
        data = content(key)
        name = self.name(key)
        given: Any = memoryview(data)
        if self.store.on_device:
            given = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(get_device(CHIP).torch_device)
        stored = self.runner.run(self.store.put(name, given, [len(data)], "uint8", owner))
        if stored is None:
            assert self.held, "there was room"
            return
        self._hold(key, owner, self.store.event(name, stored, owner))

    @rule(key=KEYS, owner=OWNERS)
    def acquire(self, key: int, owner: str) -> None:
        name = self.name(key)
        found = self.runner.run(self.store.acquire(name, owner))
        if found is None:
            assert not any(held == key for _, held in self.held), "a held feature was evicted"
        else:
            self._hold(key, owner, self.store.event(name, found, owner))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        owner, key = data.draw(st.sampled_from(sorted(self.held)))
        for _ in range(2):
            self.store.release(owner, self.name(key))
        del self.held[owner, key]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def fetch_what_is_held(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(sorted(self.held)))
        assert self._fetch(self.held[held]) == content(held[1])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def fetch_from_the_host(self, data: st.DataObject) -> None:
        owner, key = data.draw(st.sampled_from(sorted(self.held)))
        found = self.runner.run(self.store.acquire(self.name(key), owner))
        assert found is not None
        there = self.runner.run(self.store.on_host(self.name(key), found, owner))
        if there is not None:
            assert not there.generation
            assert self._fetch(self.store.event(self.name(key), there, owner)) == content(key)

    @precondition(lambda self: self.announced)
    @rule(data=st.data())
    def fetch_late(self, data: st.DataObject) -> None:
        """Released and perhaps evicted meanwhile: right, or a miss."""
        key = data.draw(st.sampled_from(sorted(self.announced)))
        try:
            assert self._fetch(self.announced[key]) == content(key)
        except TransferError:
            assert not any(held == key for _, held in self.held)

    @invariant()
    def books_balance(self) -> None:
        self.store.check_integrity()
        if not isinstance(self.store, MooncakeFeatureStore):  # there a lease holds them
            assert self.store.num_owners >= len({owner for owner, _ in self.held})

    def teardown(self) -> None:
        for owner, key in self.held:
            self.store.release(owner, self.name(key))
        assert self.store.num_owners == 0

    def _fetch(self, event: FeatureEvent) -> bytes:
        found = self.reader.fetch(event)
        return bytes(found.tolist() if self.reader.on_device else found)

    def _hold(self, key: int, owner: str, event: FeatureEvent) -> None:
        assert event.nbytes == len(content(key))
        self.held[owner, key] = self.announced[key] = event


@pytest.mark.parametrize("kind", [*kinds("embedded", "mooncake"), "device", "own device"])
def test_contract(kind: str, request: pytest.FixtureRequest) -> None:
    transport = make_transport("shm")
    clients: list[StoreClient] = []
    stores: list[FeatureStore] = []  # memory that is registered must stay

    def make_embedded() -> EmbeddedFeatureStore:
        return EmbeddedFeatureStore(transport, CAPACITY)

    def make_pair() -> tuple[FeatureStore, FeatureStore]:
        """One that is written to and one that is read from, new for each example."""
        if kind == "embedded":
            store = make_embedded()
            return store, store
        if "device" in kind:
            device = get_device(CHIP)
            store, reader = (
                DeviceFeatureStore(device, transport, make_embedded(), nbytes) for nbytes in (3 * SLOT_BYTES, 0)
            )
            stores.extend((reader, store))
            return store, reader if kind == "device" else store
        options = mooncake_options(staging_bytes=CAPACITY)
        pair = [MooncakeFeatureStore(client, make_embedded(), options) for client in clients]
        stores.extend(pair)
        return pair[0], pair[1]

    if kind == "mooncake":
        master: Master = request.getfixturevalue("master")
        # a segment has a minimum size; a store keeps to its own capacity
        clients = [StoreClient(mooncake_options(), master.address, size) for size in (16 * 1024**2, 0)]
    with asyncio.Runner() as runner:
        machine = type("Contract", (StoreContract,), {"make_pair": staticmethod(make_pair), "runner": runner})
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=30,
                stateful_step_count=30,
                deadline=None,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
            ),
        )
    if "device" in kind:
        for one in stores:
            one.close()
    for client in clients:
        client.close()
    transport.close()


async def test_a_large_feature_is_stored_once_and_a_cancelled_one_leaves_no_hole() -> None:
    """Large ones are written on a thread, so that several puts of one feature, and cancellations, can meet."""
    size = 4 << 20
    transport = EmbeddedTransport(path="shm")
    store = EmbeddedFeatureStore(transport, 2 * size)
    data = memoryview(bytes(range(256)) * (size // 256))
    try:
        stored = await asyncio.gather(*(store.put("a", data, [size], "uint8", f"r{i}") for i in range(3)))
        assert len({feature.offset for feature in stored if feature is not None}) == 1
        for wait in range(6):
            task = asyncio.create_task(store.put("b", data, [size], "uint8", "gone"))
            for _ in range(wait):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            store.release("gone", "b")
        late = await store.put("b", data, [size], "uint8", "r9")
        while late is None:  # a cancelled write may be at work still
            await asyncio.sleep(0.01)
            late = await store.put("b", data, [size], "uint8", "r9")
        assert await asyncio.to_thread(store.fetch, store.event("b", late, "r9")) == data
        store.check_integrity()
    finally:
        store.close()
        transport.close()
