"""Mooncake Store: several clients of one master, and everything that can be taken from under them."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
from mooncake_instances import MEBIBYTE, Instances, other_of, put, put_when_back, raw_client
from mooncake_master import Master
from program import until
from transports import HAS_MOONCAKE, TIMEOUT_S, make_transport

from epd_serve.protocol.wire import FeatureEvent
from epd_serve.transfer.feature_store import EmbeddedFeatureStore, StoredFeature
from epd_serve.transfer.mooncake.engine import address_of
from epd_serve.transfer.transport import TransferError

if not HAS_MOONCAKE:
    pytest.skip("mooncake is not installed", allow_module_level=True)


async def test_what_one_encoder_has_put_another_does_not_encode(instances: Instances, key: str) -> None:
    first, second, consumer = instances.start(), instances.start(), instances.start(encodes=False)
    assert await second.acquire(key, "r") is None
    await put(first, key, b"feature")
    found = await second.acquire(key, "r")
    assert found == StoredFeature(nbytes=7, shape=[7], dtype="uint8", checksum=found.checksum if found else "")
    event = second.event(key, found, "r")
    assert (event.store, event.region) == ("mooncake", None)
    assert consumer.fetch(event) == b"feature"
    again = await put(second, key, b"another encoding of it")
    assert consumer.fetch(again) == b"feature", "the first one stands"


async def test_a_full_store_makes_room_once_leases_have_ended(instances: Instances, key: str) -> None:
    """More is put than both segments of 64 MiB hold; until then the encoder keeps what the store refuses."""
    store, consumer = instances.start(), instances.start(encodes=False)
    stored_bytes, number = 0, 0
    async with asyncio.timeout(300):
        while stored_bytes <= 150 * MEBIBYTE:
            number += 1
            event = await put(store, f"{number:04d}{key[4:]}", bytes([number % 256]) * (3 * MEBIBYTE))
            assert consumer.fetch(event) == bytes([number % 256]) * (3 * MEBIBYTE)
            if event.store:
                stored_bytes += event.nbytes
            else:
                await asyncio.sleep(0.1)


async def test_two_that_put_one_feature_at_once_announce_what_stands(instances: Instances, key: str) -> None:
    """Their bytes may differ in the last bits: batches differ."""
    stores, consumer = [instances.start(), instances.start()], instances.start(encodes=False)
    look = stores[0]._find, stores[1]._find
    both = threading.Barrier(2)

    def find_at_once(number: int) -> Callable[[str], StoredFeature | None]:
        def find(mm_hash: str) -> StoredFeature | None:
            found = look[number](mm_hash)
            both.wait(300)
            return found

        return find

    for number, store in enumerate(stores):
        store._find = find_at_once(number)  # type: ignore[method-assign]
    events = await asyncio.gather(*(put(store, key, bytes([number]) * 7) for number, store in enumerate(stores)))
    first = events[0].checksum
    assert [event.checksum for event in events] == [first, first]
    for event in events:
        assert consumer.fetch(event) in (b"\0" * 7, b"\1" * 7)


async def test_a_store_that_hangs_in_a_put_is_waited_for_once(instances: Instances, key: str) -> None:
    store, go_on = instances.start(), threading.Event()
    put_there = raw_client(store).put

    def slow_put(name: str, address: int, nbytes: int) -> bool:
        assert go_on.wait(300)
        return put_there(name, address, nbytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(raw_client(store), "put", slow_put)
        started = time.monotonic()
        names = [f"{i}{key[1:]}" for i in range(3)]
        events = await asyncio.gather(*(put(store, name, name.encode()) for name in names))
        assert time.monotonic() - started < 2.8 * TIMEOUT_S, "not once for each"
        assert [event.store for event in events] == [""] * 3
        assert [store.fetch(event) for event in events] == [name.encode() for name in names]
        go_on.set()
        await until(lambda: all(raw_client(store).size(name) for name in names))


async def test_a_corrupted_object_is_a_miss_and_is_encoded_anew(instances: Instances, key: str) -> None:
    store, consumer = instances.start(), instances.start(encodes=False)
    event = await put(store, key, b"feature")
    client = raw_client(store)
    forged = bytearray(client.size(key) or 0)
    client.register(address_of(memoryview(forged)), len(forged))
    client.get(key, address_of(memoryview(forged)), len(forged))
    forged[3] ^= 1  # a bit of the feature itself; what describes it stays
    assert client.remove(key)
    assert client.put(key, address_of(memoryview(forged)), len(forged))
    with pytest.raises(TransferError, match="fails its checksum"):
        consumer.fetch(event)
    assert await store.acquire(key, "r") is None
    assert consumer.fetch(await put(store, key, b"feature")) == b"feature"


async def test_a_missing_object_and_one_of_another_size_are_misses(instances: Instances, key: str) -> None:
    store, consumer = instances.start(), instances.start(encodes=False)
    event = await put(store, key, b"feature")
    await put(store, other_of(key), b"longer than that")
    gone = FeatureEvent("r", "f" * 64, [7], "uint8", 7, event.checksum, store="mooncake")
    with pytest.raises(TransferError, match="it does not exist"):
        consumer.fetch(gone)
    with pytest.raises(TransferError, match=f"cannot get object {other_of(key)[:12]}"):
        consumer.fetch(FeatureEvent("r", other_of(key), [7], "uint8", 7, event.checksum, store="mooncake"))
    embedded = EmbeddedFeatureStore(make_transport("shm"), 64)
    with pytest.raises(TransferError, match="same feature_store"):
        embedded.fetch(event)


async def test_a_feature_that_does_not_fit_the_store_goes_the_other_way(instances: Instances, key: str) -> None:
    store, consumer = instances.start(capacity=MEBIBYTE), instances.start(encodes=False)
    event = await put(store, key, b"x" * MEBIBYTE)
    assert event.store == ""
    assert consumer.fetch(event) == b"x" * MEBIBYTE
    with pytest.raises(ValueError, match="raise feature_cache_bytes"):
        await store.put(other_of(key), memoryview(bytes(MEBIBYTE + 1)), [MEBIBYTE + 1], "uint8", "r")


async def test_without_a_master_features_go_to_their_consumers(
    instances: Instances, key: str, master: Master
) -> None:
    store, consumer = instances.start(), instances.start(encodes=False)
    before = await put(store, key, b"feature")
    master.kill()
    started = time.monotonic()
    try:
        with pytest.raises(TransferError, match=r"mooncake_master (does|did) not answer"):
            consumer.fetch(before)
        assert await store.acquire(key, "r") is None
        during = await put(store, key, b"feature")
        assert during.store == ""
        assert consumer.fetch(during) == b"feature"
        assert time.monotonic() - started < 10
    finally:
        master.start()
    event = await put_when_back(store, key)
    assert consumer.fetch(event) == b"feature"
    with pytest.raises(TransferError, match="it does not exist"):
        consumer.fetch(before)
    assert consumer.fetch(during) == b"feature"


async def test_a_master_that_hangs_is_waited_for_once(instances: Instances, master: Master, key: str) -> None:
    store, consumer = instances.start(), instances.start(encodes=False)
    master.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    try:
        event = await put(store, key, b"feature")
        assert consumer.fetch(event) == b"feature"
        for i in range(4):
            await put(store, f"{i}{other_of(key)[1:]}", b"another")
    finally:
        master.send_signal(signal.SIGCONT)
    assert time.monotonic() - started < 8, "not once for each of five features"
    await put_when_back(store, key)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_encoder_takes_its_features_along_and_another_stores_them_anew(
    instances: Instances, key: str, elsewhere: multiprocessing.process.BaseProcess, number: int
) -> None:
    """The master still believes in it for some seconds."""
    store, consumer = instances.start(), instances.start(encodes=False)
    found = await store.acquire(key, "r")
    assert found is not None and elsewhere.pid is not None
    os.kill(elsewhere.pid, number)
    started = time.monotonic()
    with pytest.raises(TransferError):
        consumer.fetch(store.event(key, found, "r"))
    assert time.monotonic() - started < 10 * TIMEOUT_S
    if number == signal.SIGSTOP:
        assert await store.acquire(key, "r") is None
    event = await put(store, key, b"feature")
    assert consumer.fetch(event) == b"feature"
    assert time.monotonic() - started < 20
