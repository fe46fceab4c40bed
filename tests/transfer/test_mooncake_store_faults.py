"""Mooncake Store with forged objects, a dead or stopped master, and dead or stopped encoders."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest
from mooncake_instances import MEBIBYTE, Instances, other_of, put, put_when_back, raw_client
from mooncake_master import Master
from transports import HAS_MOONCAKE, TIMEOUT_S, make_transport

from epd_serve.protocol.wire import FeatureEvent
from epd_serve.transfer.feature_store import EmbeddedFeatureStore
from epd_serve.transfer.mooncake.engine import address_of
from epd_serve.transfer.transport import TransferError

if not HAS_MOONCAKE:
    pytest.skip("mooncake is not installed", allow_module_level=True)


async def test_a_corrupted_object_is_a_miss_and_is_encoded_anew(instances: Instances, key: str) -> None:
    store, consumer = instances.start(), instances.start(encodes=False)
    event = await put(store, key, b"feature")
    client = raw_client(store)
    forged = bytearray(client.size(key) or 0)
    client.register(address_of(memoryview(forged)), len(forged))
    client.get(key, address_of(memoryview(forged)), len(forged))
    forged[3] ^= 1  # a bit of the feature itself; what describes it stays
    assert client.remove(key, force=True)
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
