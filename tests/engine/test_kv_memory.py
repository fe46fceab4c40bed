"""KV that is saved in host memory comes back as it was, on one rank and on several."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from device.cpu import CpuEvent
from device.emulated.accelerator import EmulatedDevice
from device.registry import get_device
from epd_serve.config import InstanceOptions
from epd_serve.engine.commands import Command, CopyBlock
from epd_serve.engine.kv_memory import KVCache, KVMemory, block_nbytes, num_kv_blocks
from epd_serve.models.sharding import head_copies, kv_heads
from epd_serve.protocol import wire
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.transfer.grouping import GroupSizer
from epd_serve.transfer.kv_sender import KVSender, OutgoingTransfer, Part
from epd_serve.transfer.shared_memory import MAPPED_SLOT, is_being_written
from epd_serve.transfer.staging import rounds
from epd_serve.transfer.transport import paired
from epd_serve.types import Role

LAYOUT = wire.KVLayout(num_layers=3, num_kv_heads=4, head_dim=2, block_size=2, dtype="float32", model="m")
NUM_BLOCKS = 9


class OtherRank:
    """Carries commands out as a follower does, in this process."""

    def __init__(self) -> None:
        self.size = 2
        self.num_reached = 0
        self.cache: KVCache | None = None

    def send(self, command: Command) -> None:
        assert self.cache is not None
        match command:
            case CopyBlock():
                self.cache.copy_block(command.source, command.target)

    @contextmanager
    def copying(self, layers: range, blocks: Sequence[int], first_cell: int, *, lands: bool) -> Iterator[None]:
        assert self.cache is not None
        yield
        self.num_reached += not blocks
        self.cache.copy(layers, blocks, first_cell, lands=lands)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_saved_blocks_come_back_elsewhere(num_ranks: int) -> None:
    device, transport = get_device("cpu"), EmbeddedTransport(path="shm")
    other: Any = OtherRank() if num_ranks == 2 else None
    memory = KVMemory(LAYOUT, NUM_BLOCKS, device, transport, followers=other)
    caches = [memory.tensor]
    if other:
        other.cache = KVCache(LAYOUT, NUM_BLOCKS, device, memory.buffer, 1, 2)
        caches.append(other.cache.tensor)
    for cache in caches:
        cache.copy_(torch.randn(cache.shape))
    before = [cache.clone() for cache in caches]
    saved = memory.save([3, 1, 7])
    for cache in caches:
        cache[:, :, [1, 3, 7]] = 0.0  # others have them now
    memory.restore(saved, 1, [3, 5])
    for cache, old in zip(caches, before, strict=True):
        torch.testing.assert_close(cache[:, :, [3, 5]], old[:, :, [1, 7]], rtol=0, atol=0)
        untouched = [2, 4, 6, 8]
        torch.testing.assert_close(cache[:, :, untouched], old[:, :, untouched], rtol=0, atol=0)
        assert not cache[:, :, [1, 7]].any()
    transport.close()


def test_a_copy_within_the_cache_is_over_when_it_is_on_all_ranks() -> None:
    """Before, no peer may write to the blocks that it reads."""
    device, transport = get_device("cpu"), EmbeddedTransport(path="shm")
    other: Any = OtherRank()
    memory = KVMemory(LAYOUT, NUM_BLOCKS, device, transport, followers=other)
    other.cache = KVCache(LAYOUT, NUM_BLOCKS, device, memory.buffer, 1, 2)
    assert memory.copied is None
    memory.copy_block(1, 2)
    copied = memory.copied
    assert copied is not None and not copied.query() and other.num_reached == 0
    copied.synchronize()
    assert copied.query() and other.num_reached == 1
    memory.copy_block(3, 2)
    assert memory.copied is not copied
    transport.close()


def test_the_host_keeps_no_second_copy_of_a_device_s_kv() -> None:
    """Blocks are handed out first in, first out: all of the host's side would be touched in time."""
    device, transport = get_device("emulated:h200:2"), EmbeddedTransport(path="shm")
    memory = KVMemory(LAYOUT, 1 << 12, device, transport, staging_bytes=1 << 16)
    assert memory.tensor.nbytes == (1 << 12) * block_nbytes(LAYOUT)
    assert memory.slab.buffer.nbytes <= 1 << 16 < memory.tensor.nbytes
    transport.close()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_kv_goes_from_device_to_device_through_few_cells(num_ranks: int) -> None:
    """In rounds, from any blocks to any others, in any layers."""
    device, transport = get_device("emulated:h200:2" if num_ranks == 1 else "cpu"), EmbeddedTransport(path="shm")

    def made() -> tuple[KVMemory, list[Tensor]]:
        other: Any = OtherRank() if num_ranks == 2 else None
        memory = KVMemory(LAYOUT, NUM_BLOCKS, device, transport, followers=other)
        if other:
            other.cache = KVCache(LAYOUT, NUM_BLOCKS, device, memory.buffer, 1, 2)
        return memory, [memory.tensor, *([other.cache.tensor] if other else [])]

    (there, sources), (here, targets) = made(), made()
    for source in sources:
        source.copy_(torch.randn(source.shape))
    theirs, ours = [3, 1, 7, 8, 2], [5, 8, 1, 2, 3]
    device.synchronize()
    assert there.staged_cells is not None and there.staged_cells < len(theirs)
    for layers, numbers in rounds(range(1, 3), len(theirs), there.staged_cells):
        some = slice(numbers.start, numbers.stop)
        with there.stage(layers, theirs[some]) as staged, here.land(layers, ours[some]) as landing:
            for start, to, count in paired(staged.spans(0, len(numbers)), landing.spans(0, len(numbers))):
                here.buffer[to : to + count] = there.buffer[start : start + count]
            assert (there.num_staged, here.num_staged) == (1, 1)
    for source, target in zip(sources, targets, strict=True):
        old, new = source.cpu(), target.cpu()
        torch.testing.assert_close(new[1:, :, ours], old[1:, :, theirs], rtol=0, atol=0)
        assert not new[:1].any() and not new[:, :, [4, 6, 7]].any()
    for memory in (there, here):
        memory.check_integrity()
        assert memory.num_staged == 0
    transport.close()


@dataclass
class Pair:
    """KV of two instances that share a device: the first has numbers."""

    here: KVMemory
    there: KVMemory
    device: EmulatedDevice
    transport: EmbeddedTransport


@pytest.fixture
def pair() -> Iterator[Pair]:
    device, transport = get_device("emulated:h200:2"), EmbeddedTransport(path="shm")
    assert isinstance(device, EmulatedDevice)
    here, there = (KVMemory(LAYOUT, size, device, transport, shares=True) for size in (NUM_BLOCKS, 2 * NUM_BLOCKS))
    here.tensor.copy_(torch.randn(here.tensor.shape))
    device.synchronize()
    yield Pair(here, there, device, transport)
    transport.close()


def test_kv_goes_from_one_device_s_memory_into_another_s(pair: Pair) -> None:
    """From any blocks to any others, in any layers, and nothing through the host."""
    here, there = pair.here, pair.there
    with here.mapped(there.region) as write:
        assert write is not None
        write(range(1, 3), [3, 1, 7], [5, 17, 1])
        del write
    old, new = here.tensor.cpu(), there.tensor.cpu()
    torch.testing.assert_close(new[1:, :, [5, 17, 1]], old[1:, :, [3, 1, 7]], rtol=0, atol=0)
    others = [block for block in range(2 * NUM_BLOCKS) if block not in (5, 17, 1)]
    assert not new[:1].any() and not new[:, :, others].any()


@pytest.mark.parametrize("heads", [2, 4])
def test_ranks_of_any_width_write_to_those_of_any_other(heads: int) -> None:
    """Each its own heads; where several keep the same ones, the first of them writes, and all of them get them."""
    device, layout = get_device("emulated:h200:2"), msgspec.structs.replace(LAYOUT, num_kv_heads=heads)
    slab = memoryview(bytearray(block_nbytes(layout)))

    def ranks(size: int, num_blocks: int) -> list[KVCache]:
        return [KVCache(layout, num_blocks, device, slab, rank, size) for rank in range(size)]

    kept = {size: [kv_heads(heads, rank, size) for rank in range(size)] for size in (1, 2, 4)}
    numbers = torch.randn(3, 2, NUM_BLOCKS, 2, heads, 2)
    for here in (1, 2, 4):
        sources = ranks(here, NUM_BLOCKS)
        for cache, own in zip(sources, kept[here], strict=True):
            cache.tensor.copy_(numbers[..., own.start : own.stop, :])
        device.synchronize()
        for there in (1, 2, 4):
            targets = ranks(there, 2 * NUM_BLOCKS)
            for cache in sources:
                with cache.mapped([target.handle for target in targets]) as write:
                    write(range(1, 3), [3, 1, 7], [5, 17, 1])
            for target, own in zip(targets, kept[there], strict=True):
                new = target.tensor.cpu()
                assert torch.equal(new[1:, :, [5, 17, 1]], numbers[1:, :, [3, 1, 7]][..., own.start : own.stop, :])
                assert not new[:1].any() and not new[:, :, [0, 2, 3, 4, *range(6, 17)]].any()
            moved = [copy for rank in range(here) for copy in head_copies(heads, rank, here, there)]
            assert sum(copy.count for copy in moved) == sum(map(len, kept[there])), "some are copied twice"


def test_memory_is_mapped_only_where_both_sides_share(pair: Pair) -> None:
    here, there, device = pair.here, pair.there, pair.device
    alone = KVMemory(LAYOUT, NUM_BLOCKS, device, EmbeddedTransport(path="shm"))
    on_cpu = KVMemory(LAYOUT, NUM_BLOCKS, get_device("cpu"), EmbeddedTransport(path="shm"), shares=True)
    elsewhere = msgspec.structs.replace(there.region, host_id="another:pid:[1]")
    for memory, region in [
        (here, alone.region),
        (alone, there.region),
        (here, on_cpu.region),
        (on_cpu, there.region),
        (here, elsewhere),
    ]:
        with memory.mapped(region) as write:
            assert write is None


def test_copies_wait_for_no_step_and_no_step_for_them(pair: Pair) -> None:
    """They have a stream of their own, and come back when they are done on it."""
    here, there, device = pair.here, pair.there, pair.device
    gate = threading.Event()
    device.current_stream().launch(gate.wait)  # type: ignore[attr-defined]
    with here.mapped(there.region) as write, here.stage(range(1), [1]) as staged:  # the engine's stream stands
        assert write is not None
        write(range(1), [1], [2])
        del write
        [(start, nbytes)] = staged.spans(0, 1)[:1]
        assert bytes(here.buffer[start : start + nbytes]) != bytes(nbytes)
    assert not device.record_event().query()
    gate.set()
    device.synchronize()
    assert torch.equal(there.tensor[0, :, 2].cpu(), here.tensor[0, :, 1].cpu())


def test_a_copy_that_is_not_waited_for_is_found(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the event of its end is missing, so the memory is unmapped while the device writes there."""
    here, there, device = pair.here, pair.there, pair.device
    gate = threading.Event()
    here._cache._copies.launch(gate.wait)  # type: ignore[attr-defined]
    monkeypatch.setattr(device, "record_event", CpuEvent)
    with pytest.raises(RuntimeError, match=r"memory is unmapped that .* work or a tensor still uses"):  # noqa: SIM117
        with here.mapped(there.region) as write:
            assert write is not None
            write(range(1), [1], [2])
            del write
    gate.set()


def test_a_cell_has_no_numbers_before_the_copy_into_it_is_done(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the event of its end is missing. The host's memory is pinned: a copy into it comes back at once."""
    gate = threading.Event()
    pair.here._cache._copies.launch(gate.wait)  # type: ignore[attr-defined]
    monkeypatch.setattr(pair.device, "record_event", CpuEvent)
    with pair.here.stage(range(1), [1]) as early:
        [(start, nbytes), *_] = early.spans(0, 1)
        cell = torch.frombuffer(pair.here.buffer, dtype=torch.float32, count=nbytes // 4, offset=start)
        assert cell.isnan().all()
        gate.set()
        pair.device.synchronize()
        assert not cell.isnan().any()


def test_memory_is_given_back_when_nobody_maps_it(pair: Pair) -> None:
    """Its owner waits: others would get memory that a peer still writes to."""
    here, there = pair.here, pair.there
    sender = KVSender(pair.transport, here, GroupSizer(num_layers=3), time.monotonic)
    target = wire.ReserveReply([5], 0, there.region, there.num_blocks, staged_cells=there.staged_cells)
    transfer = OutgoingTransfer("t", target, time.monotonic() + 60)
    arrived = threading.Event()
    sender.push(range(3), [Part(transfer, [3], [5])])
    sender.fence(transfer, arrived.set)
    assert arrived.wait(60) and transfer.error is None
    assert transfer.num_bytes == block_nbytes(LAYOUT)
    torch.testing.assert_close(there.tensor[:, :, 5].cpu(), here.tensor[:, :, 3].cpu(), rtol=0, atol=0)
    [lane] = sender._lanes.values()
    assert lane.mapped is not None and is_being_written(there.region, MAPPED_SLOT)
    there.release(pair.transport)
    assert lane.mapped is None
    lane.thread.join(60)
    assert not sender._lanes
    sender.close()


@pytest.mark.parametrize(("num_ranks", "heads_each"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_the_kv_of_a_rank_fits_into_its_device(num_ranks: int, heads_each: int) -> None:
    """More ranks than heads repeat heads, and each keeps one whole."""
    devices = ",".join(f"cuda:{index}" for index in range(num_ranks))
    options = InstanceOptions(
        name="pd0", role=Role.parse("PD"), model=Path("m"), served_model_name="m", device=devices
    )
    free = 1 << 30
    blocks = num_kv_blocks(options, LAYOUT, "cuda", free)
    rank_bytes = blocks * block_nbytes(LAYOUT) * heads_each // LAYOUT.num_kv_heads
    features = options.sizes.feature_cache_bytes
    assert 0.79 * (free - features) < rank_bytes <= 0.8 * (free - features)
    small = options.model_copy(update={"feature_cache_bytes": free // 10})
    blocks = num_kv_blocks(small, LAYOUT, "cuda", free, lambda: free // 4)
    rank_bytes = blocks * block_nbytes(LAYOUT) * heads_each // LAYOUT.num_kv_heads
    assert 0.59 * free < rank_bytes <= 0.6 * free, "95 % without the step's and the features'"


def test_states_have_room_beside_the_usual_kv() -> None:
    """Of four sequences on a CPU; a size that is given must hold one."""
    options = InstanceOptions(
        name="pd0", role=Role.parse("PD"), model=Path("m"), served_model_name="m", device="cpu"
    )
    layout = msgspec.structs.replace(LAYOUT, state_blocks=500)
    assert num_kv_blocks(options, layout, "cpu", 0) == num_kv_blocks(options, LAYOUT, "cpu", 0) + 2000
    small = options.model_copy(update={"kv_cache_bytes": 500 * block_nbytes(layout)})
    with pytest.raises(ValueError, match="which are 564 blocks, 500 of them for the recurrent state"):
        num_kv_blocks(small, layout, "cpu", 0)


def test_memory_that_another_process_took_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the measurement of what is free and the allocation."""
    device = EmulatedDevice("h200", 9)

    def share_memory(nbytes: int) -> tuple[Tensor, bytes]:
        raise torch.OutOfMemoryError(f"Tried to allocate {nbytes} bytes")

    monkeypatch.setattr(device, "share_memory", share_memory)
    monkeypatch.setattr(device, "memory", lambda: (80 << 30, 3 << 20))
    with pytest.raises(
        ValueError, match=r"no 3\.4KiB for the KV cache: 3MiB of 80GiB are free.* set kv_cache_bytes"
    ):
        KVMemory(LAYOUT, NUM_BLOCKS, device, EmbeddedTransport(path="shm"))
