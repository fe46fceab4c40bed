"""Features come in whatever the order, and requests never wait for each other's."""

from __future__ import annotations

import asyncio
import time

from epd_serve.protocol import wire
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.transfer.feature_store import EmbeddedFeatureStore
from epd_serve.worker.feature_inbox import FeatureInbox


async def test_requests_that_hold_half_of_their_features_do_not_wait_for_each_other() -> None:
    transport = EmbeddedTransport(path="shm")
    store = EmbeddedFeatureStore(transport, 1 << 12)
    inbox = FeatureInbox(200, transport, lambda: None, orphan_s=10, clock=time.monotonic)

    async def announce(mm_hash: str, request_id: str) -> None:
        feature = store.put(mm_hash, memoryview(bytes(100)), [100], "uint8", request_id)
        assert feature is not None
        await inbox.receive(store.event(mm_hash, feature, request_id))

    items = {name: [wire.MediaRef(f"{name}{i}", 1, 1) for i in range(2)] for name in ("a", "b")}
    for name, wanted in items.items():
        inbox.expect(name, wanted)
    await announce("a0", "a")
    await announce("b0", "b")
    await asyncio.wait_for(asyncio.gather(announce("a1", "a"), announce("b1", "b")), 5)
    for name, wanted in items.items():
        await asyncio.wait_for(inbox.complete(name, wanted), 1)
        inbox.check_integrity()
        inbox.release(name)
    inbox.check_integrity()
    assert inbox.num_owners == 0
    transport.close()
