"""The places of a KV cache's blocks in memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """One layer's cache in host memory.

    ``planes`` equal parts (keys and values, where these lie apart) hold ``block_bytes`` of each block, in order.
    """

    buffer: memoryview
    planes: int
    block_bytes: int

    @property
    def plane_bytes(self) -> int:
        return self.buffer.nbytes // self.planes


def remote_pieces(
    layer: LayerMemory, remote_start: int, remote_nbytes: int, runs: list[tuple[int, int, int]]
) -> list[tuple[int, memoryview]]:
    """The local bytes of runs of blocks, each with its offset in a peer's memory.

    A run is (first block here, first block there, count); the peer's layer has ``remote_nbytes`` from
    ``remote_start`` on.
    """
    pieces = []
    for plane in range(layer.planes):
        here_base, there_base = plane * layer.plane_bytes, remote_start + plane * (remote_nbytes // layer.planes)
        for here, there, count in runs:
            start = here_base + here * layer.block_bytes
            local = layer.buffer[start : start + count * layer.block_bytes]
            pieces.append((there_base + there * layer.block_bytes, local))
    return pieces


def runs_of(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Pairs of block numbers (here, there) as runs in which both count upwards."""
    runs: list[tuple[int, int, int]] = []
    for here, there in pairs:
        if runs:
            first_here, first_there, count = runs[-1]
            if here == first_here + count and there == first_there + count:
                runs[-1] = (first_here, first_there, count + 1)
                continue
        runs.append((here, there, 1))
    return runs


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
