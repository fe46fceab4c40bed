"""KV that is saved in host memory comes back as it was, on one rank and on several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from device.registry import get_device
from epd_serve.config import InstanceOptions
from epd_serve.engine.commands import Command, CopyBlock
from epd_serve.engine.kv_memory import KVCache, KVMemory, block_nbytes, num_kv_blocks
from epd_serve.protocol import wire
from epd_serve.transfer.embedded import EmbeddedTransport
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
