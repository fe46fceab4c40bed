"""A device's memory as a region: peers read what is there, and the host copies nothing."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from chips import CHIP
from transports import DEVICE_OPTIONS, mooncake_options, needs_mooncake

from device.registry import get_device
from epd_serve.engine.device_memory import are_reached
from epd_serve.engine.kv_memory import KVMemory, block_nbytes
from epd_serve.protocol import wire
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.transfer.grouping import GroupSizer
from epd_serve.transfer.kv_receiver import read_kv
from epd_serve.transfer.kv_sender import KVSender, OutgoingTransfer, Part
from epd_serve.transfer.mooncake import transport as mooncake
from epd_serve.transfer.mooncake.engine import Engine
from epd_serve.transfer.mooncake.transport import MooncakeTransport
from epd_serve.transfer.transport import TransferError

pytestmark = needs_mooncake

DEVICE = get_device(CHIP)
LAYOUT = wire.KVLayout(num_layers=3, num_kv_heads=4, head_dim=2, block_size=2, dtype="float32", model="m")


@pytest.fixture
def transports() -> Iterator[list[MooncakeTransport]]:
    """Of two instances."""
    with ExitStack() as stack:
        made = [MooncakeTransport(DEVICE_OPTIONS) for _ in range(2)]
        for transport in made:
            stack.callback(transport.close)
        yield made
        for transport in made:
            transport.check_integrity()


def test_whether_memory_is_reached(transports: list[MooncakeTransport], monkeypatch: pytest.MonkeyPatch) -> None:
    """A card may not get at what it registered; a wheel without CUDA takes a GPU's address for the host's."""
    free = DEVICE.memory()[1]
    assert are_reached(DEVICE, transports[0])
    assert DEVICE.memory()[1] == free
    for owner, name, planted in (
        (MooncakeTransport, "read", lambda *_: None),
        (Engine, "read", lambda *_: False),
        (transports[0].engine, "options", replace(DEVICE_OPTIONS, max_regions=0)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, planted)
            assert not are_reached(DEVICE, transports[0])
    others = (
        EmbeddedTransport(path="shm"),
        MooncakeTransport(replace(DEVICE_OPTIONS, device="cuda")),
        MooncakeTransport(mooncake_options()),
    )
    for transport in others:
        assert not are_reached(DEVICE, transport)
        transport.close()


def memories(transports: list[MooncakeTransport]) -> list[KVMemory]:
    """The KV of two instances; the first has numbers."""
    made = [
        KVMemory(LAYOUT, size, DEVICE, transport, registers=True)
        for size, transport in zip((9, 18), transports, strict=True)
    ]
    made[0].tensor.copy_(torch.randn(made[0].tensor.shape))
    DEVICE.synchronize()
    return made


def test_kv_goes_from_device_to_device(
    transports: list[MooncakeTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In calls of a few bytes and pieces; the other blocks are as they were, and the memory is given back."""
    gc.collect()  # memories of earlier tests
    free = DEVICE.memory()[1]
    monkeypatch.setattr(mooncake, "_MAX_BYTES", 100)
    monkeypatch.setattr(mooncake, "_MAX_PIECES", 4)
    monkeypatch.setattr(KVMemory, "copy", None)
    here, there = memories(transports)
    announced: list[wire.KVAnnouncement] = []

    class Transfer(OutgoingTransfer):
        def announce(self, announcement: wire.KVAnnouncement, there: KVMemory = there) -> wire.KVTaken:
            if announcement.parts:
                announced.append(announcement)
            read_kv(announcement, announcement.parts, there, transports[1])
            return wire.KVTaken([part.transfer_id for part in announcement.parts])

    sender = KVSender(here, GroupSizer(num_layers=3), time.monotonic)
    target = wire.ReserveReply([5, 17, 1], 0, there.region.name, staged_cells=there.staged_cells)
    transfer = Transfer("t", target)
    passed = threading.Event()
    sender.push(range(1, 3), [Part(transfer, [3, 1, 7], [5, 17, 1])])
    sender.fence(transfer, passed.set)
    assert passed.wait(60) and transfer.error is None
    assert len(announced) == 1 and announced[0].region.device == "chip", "as one"
    old, new = here.tensor.cpu(), there.tensor.cpu()
    torch.testing.assert_close(new[1:, :, [5, 17, 1]], old[1:, :, [3, 1, 7]], rtol=0, atol=0)
    others = [block for block in range(18) if block not in (5, 17, 1)]
    assert not new[:1].any() and not new[:, :, others].any()
    sender.close()
    for memory, transport in ((here, transports[0]), (there, transports[1])):
        memory.release(transport)
    with pytest.raises(TransferError):
        transports[0].read(there.region, [(0, memoryview(bytearray(8)))])
    del memory, here, there, sender, transfer, Transfer
    gc.collect()  # a class is a cycle
    DEVICE.synchronize()
    assert DEVICE.memory()[1] == free


def test_what_arrives_waits_for_copies_within_the_cache(transports: list[MooncakeTransport]) -> None:
    """The block that a copy reads may be free before the device has done it."""
    here, there = memories(transports)
    there.tensor.fill_(3.0)
    DEVICE.synchronize()
    gate, arrived = threading.Event(), threading.Event()
    DEVICE.current_stream().launch(gate.wait)  # type: ignore[attr-defined]
    there.copy_block(5, 6)

    def read() -> None:
        with here.stage(range(3), [[1]]) as [staged], there.land(range(3), [[5]]) as [landing]:
            pairs = zip(staged, landing, strict=True)
            pieces = [(start, there.buffer[to : to + count]) for (start, count), (to, _) in pairs]
            transports[1].read(here.region, pieces)
        arrived.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert not arrived.wait(0.3)
    gate.set()
    thread.join(60)
    assert arrived.is_set()
    new = there.tensor.cpu()
    assert set(new[:, :, 6].flatten().tolist()) == {3.0}
    torch.testing.assert_close(new[:, :, 5], here.tensor.cpu()[:, :, 1], rtol=0, atol=0)


def test_kv_that_cannot_be_registered(
    transports: list[MooncakeTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a card maps less of a GPU's memory than it has."""
    register = Engine.register

    def small(engine: Engine, address: int, nbytes: int) -> None:
        if nbytes >= 9 * block_nbytes(LAYOUT):
            raise TransferError("mooncake cannot register it")
        register(engine, address, nbytes)

    monkeypatch.setattr(Engine, "register", small)
    memory = KVMemory(LAYOUT, 9, DEVICE, transports[0], staging_bytes=1, registers=True)
    assert memory.region.device == "" and memory.staged_cells == 1
