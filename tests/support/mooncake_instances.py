"""Feature stores over one mooncake_master, as the instances of a deployment have them."""

from __future__ import annotations

import asyncio

from mooncake_master import Master
from transports import make_transport, mooncake_options

from epd_serve.protocol.wire import FeatureEvent
from epd_serve.transfer.feature_store import EmbeddedFeatureStore
from epd_serve.transfer.mooncake.engine import StoreClient
from epd_serve.transfer.mooncake.store import MooncakeFeatureStore

MEBIBYTE = 1024**2


class Instances:
    """Stores as the instances of a deployment have them. Clients are slow to close, so all tests share three."""

    def __init__(self, master: Master) -> None:
        options = mooncake_options()
        self._encoders = [StoreClient(options, master.address, 64 * MEBIBYTE) for _ in range(2)]
        self._reader = StoreClient(options, master.address, 0)
        self._transport = make_transport("shm")
        self.all: list[MooncakeFeatureStore] = []  # memory that is registered must stay
        self.started: list[MooncakeFeatureStore] = []

    def start(self, capacity: int = 4 * MEBIBYTE, *, encodes: bool = True) -> MooncakeFeatureStore:
        num_encoders = sum(store._client is not self._reader for store in self.started)
        client = self._encoders[num_encoders] if encodes else self._reader
        local = EmbeddedFeatureStore(self._transport, capacity)
        store = MooncakeFeatureStore(client, local, mooncake_options(staging_bytes=capacity))
        self.all.append(store)
        self.started.append(store)
        return store

    def close(self) -> None:
        for client in (*self._encoders, self._reader):
            client.close()
        self._transport.close()


def other_of(key: str) -> str:
    return key[::-1]


async def put(store: MooncakeFeatureStore, key: str, data: bytes, owner: str = "r") -> FeatureEvent:
    stored = await store.put(key, memoryview(data), [len(data)], "uint8", owner)
    assert stored is not None
    event = store.event(key, stored, owner)
    store.release(owner, key)
    return event


async def put_when_back(store: MooncakeFeatureStore, key: str) -> FeatureEvent:
    """Put features until the store takes them again."""
    for i in range(100):
        event = await put(store, f"{i:03d}{key[3:]}", b"feature")
        if event.store:
            return event
        await asyncio.sleep(0.2)
    raise AssertionError("the store does not come back")


def raw_client(store: MooncakeFeatureStore) -> StoreClient:
    """To do to an object what no instance would."""
    return store._client
