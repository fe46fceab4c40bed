"""The places of a KV cache's blocks in memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from epd_serve.transfer.transport import Piece, paired, slab_spans


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """One layer's cache in host memory.

    ``planes`` equal parts (keys and values, where these lie apart) hold ``block_bytes`` of each block, in order.
    """

    buffer: memoryview
    planes: int
    block_bytes: int

    @property
    def num_blocks(self) -> int:
        return self.buffer.nbytes // self.planes // self.block_bytes

    def pieces(self, blocks: Sequence[int], remote: Sequence[int], start: int, num_blocks: int) -> list[Piece]:
        """The bytes of blocks and their places in a peer's layer of ``num_blocks``, whose memory begins at
        ``start``."""
        size, planes = self.block_bytes, self.planes
        here = slab_spans(range(1), blocks, self.num_blocks, size, planes=planes)
        there = slab_spans(range(1), remote, num_blocks, size, start=start, planes=planes)
        return [(to, self.buffer[at : at + nbytes]) for at, to, nbytes in paired(here, there)]


def layer_memory(cache: torch.Tensor, num_blocks: int) -> LayerMemory:
    """A layer's cache as memory. Raises ValueError for one elsewhere, or that is not laid out by blocks."""
    if cache.device.type != "cpu":
        raise ValueError(
            f"kv: grouped moves host memory, and this KV cache is on {cache.device}; use mooncake or nixl"
        )
    strides = cache.stride()
    order = sorted(range(cache.dim()), key=lambda dim: -strides[dim])
    dense = cache.permute(order)
    if not dense.is_contiguous():
        raise ValueError(f"a KV cache with strides {tuple(cache.stride())} has holes")
    sizes = list(dense.shape)
    if sizes[0] == num_blocks:
        planes = 1
    elif len(sizes) > 1 and sizes[1] == num_blocks:
        planes = sizes[0]
    else:
        raise ValueError(f"a KV cache of shape {tuple(sizes)} is not laid out by its {num_blocks} blocks")
    nbytes = cache.numel() * cache.element_size()
    raw = (ctypes.c_char * nbytes).from_address(cache.data_ptr())
    return LayerMemory(memoryview(raw).cast("B"), planes, nbytes // planes // num_blocks)
