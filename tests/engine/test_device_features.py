"""Features on a device: what is copied is what was announced, or a miss; nobody maps what is another's."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest
import torch
from chips import CHIP, ENVIRONMENT

from device.registry import get_device
from epd_serve.engine.device_features import SLOT_BYTES, Copies, DeviceFeatureStore
from epd_serve.protocol import wire
from epd_serve.protocol.wire import FeatureEvent
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.transfer.feature_store import EmbeddedFeatureStore
from epd_serve.transfer.transport import NotMapped, PeerGone, TransferError

DEVICE = get_device(CHIP)
ENCODER = f"""
import asyncio, chip.chip, sys, torch
from device.registry import get_device
from epd_serve.engine.device_features import SLOT_BYTES, DeviceFeatureStore
from epd_serve.protocol import wire
from epd_serve.transfer.feature_store import EmbeddedFeatureStore
from epd_serve.transfer.embedded import EmbeddedTransport
transport = EmbeddedTransport(path="shm")
device, host = get_device("{CHIP}"), EmbeddedFeatureStore(transport, 4096)
store = DeviceFeatureStore(device, transport, host, SLOT_BYTES)
data = torch.full((1000,), 7, dtype=torch.uint8).to(device.torch_device)
feature = asyncio.run(store.put("a", data, [1000], "uint8", "r"))
print(wire.encode(store.event("a", feature, "r")).hex(), flush=True)
sys.stdin.readline()
"""


class Pair:
    """An encoder's store of two places, and a consumer's of the same host."""

    def __init__(self, stack: ExitStack) -> None:
        transport = EmbeddedTransport(path="shm")
        stack.callback(transport.close)
        self.encoder, self.consumer = (
            DeviceFeatureStore(DEVICE, transport, EmbeddedFeatureStore(transport, 1 << 20), nbytes)
            for nbytes in (2 * SLOT_BYTES, 0)
        )
        stack.callback(self.encoder.close)
        stack.callback(self.consumer.close)

    def put(self, name: str, number: int, nbytes: int = SLOT_BYTES) -> FeatureEvent:
        """Announce a feature that nobody holds any more."""
        data = torch.full((nbytes,), number, dtype=torch.uint8).to(DEVICE.torch_device)
        feature = asyncio.run(self.encoder.put(name, data, [nbytes], "uint8", "r"))
        assert feature is not None
        self.encoder.release("r", name)
        return self.encoder.event(name, feature, "r")


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack)


def test_a_feature_overwritten_while_it_is_copied_is_a_miss(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    event = pair.put("a", 1)
    assert set(pair.consumer.fetch(event).tolist()) == {1}
    copy, calls = Copies.within, itertools.count(1)

    def late(*arguments: Any) -> Any:
        if next(calls) == 1:  # between a consumer's look at the event and the end of its copy
            for number in (2, 3):
                pair.put(f"other {number}", number)
        return copy(*arguments)

    with monkeypatch.context() as planted:
        planted.setattr(Copies, "within", late)
        with pytest.raises(TransferError):
            pair.consumer.fetch(event)
    again = pair.put("a", 4)
    assert again.offset == event.offset or again.generation != event.generation
    assert set(pair.consumer.fetch(again).tolist()) == {4}
    with pytest.raises(TransferError):
        pair.consumer.fetch(event)


def test_a_copy_waits_for_the_tower_and_for_no_step(pair: Pair) -> None:
    """The feature is read when it is computed; the stream of the engine may stand meanwhile."""
    gate = threading.Event()
    DEVICE.current_stream().launch(gate.wait)  # type: ignore[attr-defined]
    try:
        tower = DEVICE.stream()
        with tower:
            data = torch.full((100,), 5, dtype=torch.uint8, device=DEVICE.torch_device)
        tower.synchronize()
        feature = asyncio.run(pair.encoder.put("a", data, [100], "uint8", "r"))
        assert feature is not None
        with DEVICE.stream():
            assert set(pair.consumer.fetch(pair.encoder.event("a", feature, "r")).tolist()) == {5}
        assert not DEVICE.record_event().query()
    finally:
        gate.set()


def test_memory_that_is_not_reached(pair: Pair) -> None:
    event = pair.put("a", 1)
    assert event.region is not None
    changes = {"device": "cuda", "host_id": "another:pid:[1]", "handle": b'[0, 0, "", 8]', "fd": 1 << 20}
    for name, value in changes.items():
        region = msgspec.structs.replace(event.region, **{name: value})
        with pytest.raises(TransferError) as raised:
            pair.consumer.fetch(msgspec.structs.replace(event, region=region))
        assert isinstance(raised.value, NotMapped) == (name != "fd")


def test_what_lies_outside_is_refused(pair: Pair) -> None:
    event = pair.put("a", 1)
    for offset in (2 * SLOT_BYTES, -SLOT_BYTES, 8):
        with pytest.raises(TransferError):
            pair.consumer.fetch(msgspec.structs.replace(event, offset=offset))


def test_an_encoder_gives_up_its_memory_when_nobody_maps_it() -> None:
    free = DEVICE.memory()[1]
    with ExitStack() as stack:
        pair = Pair(stack)
        event = pair.put("a", 1)
        pair.consumer.fetch(event)
        began_s = time.monotonic()
        pair.encoder.close()
        assert time.monotonic() - began_s < 4, "the consumer unmaps it in time"
        with pytest.raises(TransferError):
            pair.consumer.fetch(event)
    del pair
    DEVICE.synchronize()
    assert DEVICE.memory()[1] == free


@pytest.mark.slow
def test_a_feature_of_a_killed_encoder_is_a_miss(pair: Pair) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ENCODER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    ) as encoder:
        assert encoder.stdout is not None
        event = wire.decode(bytes.fromhex(encoder.stdout.readline()), FeatureEvent)
        assert set(pair.consumer.fetch(event).tolist()) == {7}
        encoder.kill()
        encoder.wait()
        with pytest.raises((PeerGone, TransferError)):
            pair.consumer.fetch(event)
    with pytest.raises(TransferError):  # it is not mapped again
        pair.consumer.fetch(event)
