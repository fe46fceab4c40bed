"""The KV cache itself: one registered slab, seen as a tensor by the model and as byte ranges by the transport."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from device.base import Device
from epd_serve.config import InstanceOptions
from epd_serve.config.sizes import MIN_BLOCKS, blocks_in
from epd_serve.engine.commands import CopyBlock, Land
from epd_serve.engine.followers import Followers
from epd_serve.protocol.wire import KVLayout, Region
from epd_serve.transfer.transport import Piece, Transport


def block_nbytes(layout: KVLayout) -> int:
    """Bytes of one block: K and V of all its tokens in all layers."""
    dtype: torch.dtype = getattr(torch, layout.dtype)
    return 2 * layout.num_layers * layout.block_size * layout.num_kv_heads * layout.head_dim * dtype.itemsize


class KVCache:
    """One rank's KV, [layers, 2, num_blocks, block_size, its kv_heads, head_dim]: block 0 is scratch.

    The slab has the same shape with all KV heads; it is where peers land bytes (:meth:`land`) and where outgoing
    bytes are staged (:meth:`stage`). On a CPU that is not shared with other ranks the slab *is* the cache.

    Args:
        slab: bytes of all heads' KV.
        heads: this rank's, among the layout's; None where there is no other rank.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        device: Device,
        slab: memoryview | mmap.mmap,
        heads: range | None = None,
    ) -> None:
        dtype: torch.dtype = getattr(torch, layout.dtype)
        shape = (layout.num_layers, 2, num_blocks, layout.block_size, layout.num_kv_heads, layout.head_dim)
        host = torch.frombuffer(slab, dtype=dtype).view(shape)
        self._host = host if heads is None else host[..., heads.start : heads.stop, :]
        self._is_slab = device.type == "cpu" and heads is None
        self._copies = device.stream()
        self._staging = threading.Lock()  # torch before 2.13 forgets which stream a second thread came from
        self.tensor: Tensor = self._host
        if not self._is_slab:
            self.tensor = torch.zeros(self._host.shape, dtype=dtype, device=device.torch_device)

    def copy_block(self, source: int, target: int) -> None:
        self.tensor[:, :, target] = self.tensor[:, :, source]

    def stage(self, layers: range, blocks: Sequence[int]) -> None:
        """Bring blocks of some layers from the cache into the slab, once the device has written them.

        On a stream of its own: else it would wait for all layers that were launched since.
        """
        if not self._is_slab:
            host_blocks = torch.tensor(blocks)
            with self._staging, self._copies:
                part = self.tensor[layers.start : layers.stop, :, host_blocks.to(self.tensor.device)]
                self._host[layers.start : layers.stop, :, host_blocks] = part.cpu()

    def land(self, blocks: Sequence[int]) -> None:
        """Bring blocks that a peer wrote into the slab to where the model reads them."""
        if not self._is_slab:
            host_blocks = torch.tensor(blocks)
            landed = self._host[:, :, host_blocks].to(self.tensor.device)
            self.tensor[:, :, host_blocks.to(self.tensor.device)] = landed


class KVMemory:
    """The KV of an instance: its slab, seen by the transport, and the cache of its only or first rank.

    Args:
        heads: the first rank's, where ``followers`` keep the others.
        followers: the other ranks, which do to their heads what is done here.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        device: Device,
        transport: Transport,
        *,
        heads: range | None = None,
        followers: Followers | None = None,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        nbytes = block_nbytes(layout)
        self.block_bytes = nbytes // (2 * layout.num_layers)  # K or V of one layer
        self.slab = slab = transport.allocate("kv", num_blocks * nbytes)
        self.region: Region = slab.region
        self._bytes = slab.buffer
        self._device = device
        try:
            self._cache = KVCache(layout, num_blocks, device, slab.buffer, heads)
        except BaseException:  # the device has no room for it, say
            transport.release(slab)
            raise
        self._followers = followers

    @property
    def tensor(self) -> Tensor:
        """[layers, 2, num_blocks, block_size, kv_heads of this rank, head_dim]"""
        return self._cache.tensor

    def copy_block(self, source: int, target: int) -> None:
        if self._followers is not None:
            self._followers.send(CopyBlock(source, target))
        self._cache.copy_block(source, target)

    def land(self, blocks: Sequence[int]) -> None:
        """Bring blocks that a peer wrote into the slab to where the model reads them."""
        if self._followers is not None:
            self._followers.send(Land(list(blocks)))
        self._cache.land(blocks)

    def save(self, blocks: Sequence[int]) -> Tensor:
        """A copy of blocks in host memory: [layers, 2, len(blocks), block_size, kv_heads, head_dim], all heads."""
        self._device.record_event().synchronize()  # the device may not have written them yet
        for layer in range(self.layout.num_layers):  # one by one: the device has little memory to spare
            self.stage(range(layer, layer + 1), blocks)
        return self._slab[:, :, torch.tensor(blocks)]

    def restore(self, saved: Tensor, first: int, blocks: Sequence[int]) -> None:
        """Bring saved blocks, from number ``first`` on, back to other places."""
        self._slab[:, :, torch.tensor(blocks)] = saved[:, :, first : first + len(blocks)]
        self.land(blocks)

    @property
    def _slab(self) -> Tensor:
        """[layers, 2, num_blocks, block_size, kv_heads, head_dim], all heads."""
        layout = self.layout
        shape = (layout.num_layers, 2, self.num_blocks, layout.block_size, layout.num_kv_heads, layout.head_dim)
        return torch.frombuffer(self._bytes, dtype=getattr(torch, layout.dtype)).view(shape)

    def pieces(
        self, layers: range, local: Sequence[int], remote: Sequence[int], remote_num_blocks: int
    ) -> list[Piece]:
        """Slab bytes of ``local`` blocks in ``layers``, and where a slab of ``remote_num_blocks`` has its own."""
        runs = _merge_runs(local, remote)
        size = self.block_bytes
        pieces: list[Piece] = []
        for layer in layers:
            for half in (0, 1):
                here = (layer * 2 + half) * self.num_blocks
                there = (layer * 2 + half) * remote_num_blocks
                for local_block, remote_block, count in runs:
                    start = (here + local_block) * size
                    pieces.append(((there + remote_block) * size, self._bytes[start : start + count * size]))
        return pieces

    def nbytes(self, num_layers: int, num_blocks: int) -> int:
        """Bytes of so many blocks in so many layers."""
        return 2 * self.block_bytes * num_layers * num_blocks

    def stage(self, layers: range, blocks: Sequence[int]) -> None:
        """Bring blocks of some layers from the cache into the slab."""
        if self._followers is None:
            self._cache.stage(layers, blocks)
        else:
            with self._followers.staging(layers, blocks):
                self._cache.stage(layers, blocks)


def _merge_runs(local: Sequence[int], remote: Sequence[int]) -> list[tuple[int, int, int]]:
    """(local block, remote block, count) of the runs that are consecutive on both sides."""
    runs: list[tuple[int, int, int]] = []
    for here, there in zip(local, remote, strict=True):
        if runs and (here, there) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((here, there, 1))
    return runs


_DEFAULT_KV_BYTES = 1 << 28
#: Of an accelerator's memory that is free once the weights are loaded; activations need the rest.
_FREE_MEMORY_FOR_KV = 0.8


def num_kv_blocks(options: InstanceOptions, layout: KVLayout, device_type: str, free_bytes: int) -> int:
    """Blocks of the KV cache; ``free_bytes`` are left on the fullest of the instance's devices.

    Raises ValueError for a ``kv_cache_bytes`` that is too small.
    """
    if options.num_blocks is not None:
        return options.num_blocks
    block_bytes = block_nbytes(layout)
    if options.kv_cache_bytes is not None:
        return blocks_in(options.kv_cache_bytes, block_bytes=block_bytes, block_size=layout.block_size)
    if device_type in ("cpu", "emulated"):  # in the memory of the host
        return max(_DEFAULT_KV_BYTES // block_bytes, MIN_BLOCKS)
    heads_each = -(-layout.num_kv_heads // len(options.devices))  # more ranks than heads repeat them
    return max(
        int(free_bytes * _FREE_MEMORY_FOR_KV) * layout.num_kv_heads // (block_bytes * heads_each), MIN_BLOCKS
    )


def resolve_dtype(name: str, config: Any) -> torch.dtype:
    """The dtype of a name; ``auto`` is the one in which the checkpoint was saved."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    declared = getattr(config, "dtype", None) or torch.float32
    return declared if isinstance(declared, torch.dtype) else getattr(torch, declared)


def check_dtype(dtype: torch.dtype, device: Device) -> None:
    """Raise ValueError for a dtype that the device does not serve."""
    if dtype not in device.dtypes:
        possible = " or ".join(str(possible).removeprefix("torch.") for possible in device.dtypes)
        raise ValueError(
            f"{device.name} does not serve models in {str(dtype).removeprefix('torch.')}; set dtype: {possible}"
        )
