"""Features on a device: what is copied is what was announced, or a miss; nobody maps what is another's."""

from __future__ import annotations

import asyncio
import subprocess
import sys
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
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.transfer.feature_store import EmbeddedFeatureStore
device, transport = get_device("{CHIP}"), EmbeddedTransport(path="shm")
store = DeviceFeatureStore(device, transport, EmbeddedFeatureStore(transport, 4096), SLOT_BYTES)
data = torch.full((1000,), 7, dtype=torch.uint8).to(device.torch_device)
feature = asyncio.run(store.put("a", data, [1000], "uint8", "r"))
print(wire.encode(store.event("a", feature, "r")).hex(), flush=True)
sys.stdin.readline()
"""


class Pair:
    """An encoder's store of two places, and a consumer's."""

    def __init__(self, stack: ExitStack) -> None:
        self.transport = EmbeddedTransport(path="shm")
        stack.callback(self.transport.close)
        self.encoder, self.consumer = (
            DeviceFeatureStore(DEVICE, self.transport, EmbeddedFeatureStore(self.transport, 1 << 20), nbytes)
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


def test_a_feature_that_is_overwritten_while_it_is_copied_is_a_miss(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = pair.put("a", 1)
    assert set(pair.consumer.fetch(event).tolist()) == {1}
    within = Copies.within

    def late(copies: Copies, source: Any, target: Any = None) -> Any:
        if target is None:  # between a consumer's look at the event and its copy
            monkeypatch.setattr(Copies, "within", within)
            for number in (2, 3):
                pair.put(f"other {number}", number)
        return within(copies, source, target)

    monkeypatch.setattr(Copies, "within", late)
    with pytest.raises(TransferError, match="given up by its encoder"):
        pair.consumer.fetch(event)
    again = pair.put("a", 4)
    assert again.offset == event.offset or again.generation != event.generation
    assert set(pair.consumer.fetch(again).tolist()) == {4}
    with pytest.raises(TransferError, match="given up by its encoder"):
        pair.consumer.fetch(event)


def test_a_copy_waits_for_the_tower_and_for_no_step(pair: Pair) -> None:
    """The feature is read when it is computed; the stream of the engine may stand meanwhile."""
    import threading

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


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"device": "cuda"}, NotMapped),
        ({"host_id": "another:pid:[1]"}, NotMapped),
        ({"handle": b'[0, 0, "", 8]'}, NotMapped),
        ({"fd": 1 << 20}, TransferError),
    ],
)
def test_memory_that_is_not_reached(change: dict[str, Any], expected: type[Exception], pair: Pair) -> None:
    event = pair.put("a", 1)
    assert event.region is not None
    event = msgspec.structs.replace(event, region=msgspec.structs.replace(event.region, **change))
    with pytest.raises(expected) as raised:
        pair.consumer.fetch(event)
    assert isinstance(raised.value, NotMapped) == (expected is NotMapped)


@pytest.mark.parametrize(
    "change", [{"offset": 2 * SLOT_BYTES}, {"offset": -SLOT_BYTES}, {"offset": 8}, {"nbytes": 1 << 20}]
)
def test_what_lies_outside_is_refused(change: dict[str, int], pair: Pair) -> None:
    event = msgspec.structs.replace(pair.put("a", 1), **change)
    with pytest.raises(TransferError, match="outside of its store"):
        pair.consumer.fetch(event)


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


def test_a_feature_of_a_killed_encoder_is_a_miss(pair: Pair) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ENCODER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
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
