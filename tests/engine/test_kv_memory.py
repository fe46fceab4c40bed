"""KV that is saved in host memory comes back as it was, on one rank and on several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from device.registry import get_device
from epd_serve.config import InstanceOptions
from epd_serve.engine.commands import Command, CopyBlock
from epd_serve.engine.kv_memory import KVCache, KVMemory, block_nbytes, num_kv_blocks
from epd_serve.protocol import wire
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.transfer.staging import paired, rounds
from epd_serve.types import Role

LAYOUT = wire.KVLayout(num_layers=3, num_kv_heads=4, head_dim=2, block_size=2, dtype="float32", model="m")
NUM_BLOCKS = 9


class OtherRank:
    """Carries commands out as a follower does, in this process."""

    def __init__(self) -> None:
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
        self.cache.copy(layers, blocks, first_cell, lands=lands)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_saved_blocks_come_back_elsewhere(num_ranks: int) -> None:
    device, transport = get_device("cpu"), EmbeddedTransport(path="shm")
    other: Any = OtherRank() if num_ranks == 2 else None
    memory = KVMemory(LAYOUT, NUM_BLOCKS, device, transport, heads=range(2) if other else None, followers=other)
    caches = [memory.tensor]
    if other:
        other.cache = KVCache(LAYOUT, NUM_BLOCKS, device, memory.buffer, heads=range(2, 4))
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
        memory = KVMemory(
            LAYOUT, NUM_BLOCKS, device, transport, heads=range(2) if other else None, followers=other
        )
        if other:
            other.cache = KVCache(LAYOUT, NUM_BLOCKS, device, memory.buffer, heads=range(2, 4))
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
    assert 0.79 * free < rank_bytes <= 0.8 * free


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
