"""KV that is saved in host memory comes back as it was."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch
from chip.accelerator import ChipDevice

from device.cpu import CpuEvent
from device.registry import get_device
from epd_serve.config import InstanceOptions
from epd_serve.engine.kv_memory import KVMemory, block_nbytes, num_kv_blocks
from epd_serve.protocol import wire
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.transfer.staging import rounds
from epd_serve.transfer.transport import TransferError, pair_spans
from epd_serve.types import Role

LAYOUT = wire.KVLayout(num_layers=3, num_kv_heads=4, head_dim=2, block_size=2, dtype="float32", model="m")
NUM_BLOCKS = 9
OPTIONS = InstanceOptions(name="pd0", role=Role.parse("PD"), model=Path("m"), served_model_name="m", device="cpu")


def test_kv_goes_from_device_to_device_through_few_cells() -> None:
    """In rounds, from any blocks to any others, in any layers."""
    device, transport = get_device("chip:2"), EmbeddedTransport(path="shm")
    there, here = (KVMemory(LAYOUT, NUM_BLOCKS, device, transport) for _ in range(2))
    there.tensor.copy_(torch.randn(there.tensor.shape))
    theirs, ours = [3, 1, 7, 8, 2], [5, 8, 1, 2, 3]
    device.synchronize()
    assert there.staged_cells is not None and there.staged_cells < len(theirs)
    for layers, numbers in rounds(range(1, 3), len(theirs), there.staged_cells):
        some = slice(numbers.start, numbers.stop)
        with there.stage(layers, [theirs[some]]) as [staged], here.land(layers, [ours[some]]) as [landing]:
            for start, to, count in pair_spans(staged, landing):
                here.buffer[to : to + count] = there.buffer[start : start + count]
            assert (there.num_staged, here.num_staged) == (1, 1)
    old, new = there.tensor.cpu(), here.tensor.cpu()
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
    device: ChipDevice
    transport: EmbeddedTransport


@pytest.fixture
def pair() -> Iterator[Pair]:
    device, transport = get_device("chip:2"), EmbeddedTransport(path="shm")
    assert isinstance(device, ChipDevice)
    here, there = (KVMemory(LAYOUT, size, device, transport, shares=True) for size in (NUM_BLOCKS, 2 * NUM_BLOCKS))
    here.tensor.copy_(torch.randn(here.tensor.shape))
    device.synchronize()
    yield Pair(here, there, device, transport)
    transport.close()


def test_kv_goes_from_one_device_s_memory_into_another_s_until_it_is_given_back(pair: Pair) -> None:
    """From any blocks to any others, in any layers. Its owner waits: a peer may still read."""
    here, there = pair.here, pair.there
    assert there.maps(here.region)
    there.read_mapped(here.region, range(1, 3), [3, 1, 7], [5, 17, 1])
    old, new = here.tensor.cpu(), there.tensor.cpu()
    torch.testing.assert_close(new[1:, :, [5, 17, 1]], old[1:, :, [3, 1, 7]], rtol=0, atol=0)
    others = [block for block in range(2 * NUM_BLOCKS) if block not in (5, 17, 1)]
    assert not new[:1].any() and not new[:, :, others].any()
    here.release(pair.transport)
    with pytest.raises(TransferError):
        there.read_mapped(here.region, range(1), [1], [2])


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
        assert not memory.maps(region)


def test_copies_wait_for_no_step_and_no_step_for_them(pair: Pair) -> None:
    """They have a stream of their own, and come back when they are done on it."""
    here, there, device = pair.here, pair.there, pair.device
    gate = threading.Event()
    device.current_stream().launch(gate.wait)  # type: ignore[attr-defined]
    there.read_mapped(here.region, range(1), [1], [2])
    with here.stage(range(1), [[1]]) as [staged]:  # the engine's stream stands
        [(start, nbytes)] = staged[:1]
        assert bytes(here.buffer[start : start + nbytes]) != bytes(nbytes)
    assert not device.record_event().query()
    gate.set()
    device.synchronize()
    assert torch.equal(there.tensor[0, :, 2].cpu(), here.tensor[0, :, 1].cpu())


def test_a_cell_has_no_numbers_before_its_copy_is_done(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the event of its end is missing. The host's memory is pinned: a copy into it comes back at once."""
    gate = threading.Event()
    pair.here._copies.launch(gate.wait)  # type: ignore[attr-defined]
    monkeypatch.setattr(pair.device, "record_event", CpuEvent)
    with pair.here.stage(range(1), [[1]]) as [early]:
        [(start, nbytes), *_] = early
        cell = torch.frombuffer(pair.here.buffer, dtype=torch.float32, count=nbytes // 4, offset=start)
        assert cell.isnan().all()
        gate.set()
        pair.device.synchronize()
        assert not cell.isnan().any()


def test_the_kv_of_an_accelerator_fits_beside_step_and_features() -> None:
    free = 1 << 30
    small = OPTIONS.model_copy(update={"device": "cuda:0", "feature_cache_bytes": free // 10})
    nbytes = num_kv_blocks(small, LAYOUT, "cuda", free, lambda: free // 4) * block_nbytes(LAYOUT)
    assert 0.59 * free < nbytes <= 0.6 * free, "95 % without the step's and the features'"


def test_states_have_room_beside_the_usual_kv() -> None:
    """Of four sequences on a CPU; a size that is given must hold one."""
    layout = msgspec.structs.replace(LAYOUT, state_blocks=500)
    assert num_kv_blocks(OPTIONS, layout, "cpu", 0, int) == num_kv_blocks(OPTIONS, LAYOUT, "cpu", 0, int) + 2000
    small = OPTIONS.model_copy(update={"kv_cache_bytes": 500 * block_nbytes(layout)})
    with pytest.raises(ValueError, match="which are 508 blocks, 500 of them for the recurrent state"):
        num_kv_blocks(small, layout, "cpu", 0, int)


def test_memory_that_another_process_took_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the measurement of what is free and the allocation."""
    device = ChipDevice(9)

    def share_memory(nbytes: int) -> tuple[torch.Tensor, bytes]:
        raise torch.OutOfMemoryError(f"Tried to allocate {nbytes} bytes")

    monkeypatch.setattr(device, "share_memory", share_memory)
    monkeypatch.setattr(device, "memory", lambda: (80 << 30, 3 << 20))
    with pytest.raises(ValueError, match=r"lacks memory for 3\.4KiB of KV: 3MiB of 80GiB .* kv_cache_bytes"):
        KVMemory(LAYOUT, NUM_BLOCKS, device, EmbeddedTransport(path="shm"))
