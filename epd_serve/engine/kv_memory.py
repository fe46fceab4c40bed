"""The KV cache: a tensor for the model, and the registered slab through which peers access it."""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import msgspec
import torch
from torch import Tensor

from device.base import Device, Event
from device.copies import to_device
from device.ops.linear import multiplies_halves
from epd_serve.config import InstanceOptions
from epd_serve.config.sizes import MIN_BLOCKS, blocks_in, in_binary_units
from epd_serve.engine.device_memory import MappedMemory, register
from epd_serve.protocol.wire import KVLayout, Region
from epd_serve.transfer.shared_memory import release_mapped
from epd_serve.transfer.staging import StagingArea, rounds
from epd_serve.transfer.transport import DeviceBytes, DeviceSlab, Span, TransferError, Transport, slab_spans

logger = logging.getLogger(__name__)


def block_nbytes(layout: KVLayout) -> int:
    """Return the bytes of one block: K and V of all its tokens in all layers."""
    dtype: torch.dtype = getattr(torch, layout.dtype)
    return 2 * layout.num_layers * layout.block_size * layout.num_kv_heads * layout.head_dim * dtype.itemsize


class KVMemory:
    """The KV of an instance: the model's blocks, and the slab through which peers access them.

    Block 0 is scratch. Steps run on the stream current at construction. Peers read announced blocks; only
    this instance writes. On a CPU the slab *is* the cache. If the transport can access device memory, the cache is
    registered, and peers on this host may map it. Otherwise KV passes through a bounded area of cells
    (:mod:`epd_serve.transfer.staging`), on the threads that move it and on a separate stream.

    Args:
        lease_s: time to keep cells that a peer may still write to.
        shares: instances on this host may read each other's KV directly on the device.
        registers: the transport can access device memory.

    Attributes:
        tensor: [layers, 2, num_blocks, block_size, kv_heads, head_dim].
        block_bytes: K or V of a block in one layer.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        device: Device,
        transport: Transport,
        *,
        staging_bytes: int = 0,
        lease_s: float = 0.0,
        shares: bool = False,
        registers: bool = False,
    ) -> None:
        nbytes = block_nbytes(layout)
        self.layout, self.num_blocks = layout, num_blocks
        self.block_bytes = nbytes // (2 * layout.num_layers)
        self._device = device
        self._dtype: torch.dtype = getattr(torch, layout.dtype)
        self._shape = (layout.num_layers, 2, num_blocks, layout.block_size, layout.num_kv_heads, layout.head_dim)
        self._steps, self._copies = device.current_stream(), device.stream()
        self._copying = threading.Lock()  # torch before 2.13 does not restore a second thread's stream
        # event of the latest copy within the cache; blocks may be freed before the copy is done
        self._copied: Event | None = None
        self._area: StagingArea | None = None
        self._mapped: MappedMemory | None = None
        self._registered: DeviceSlab | None = None
        self._unpin: weakref.finalize[..., Any] | None = None
        self.staged_cells: int | None = None
        if device.type == "cpu":
            self.slab = transport.allocate("kv", num_blocks * nbytes)
            self.region: Region = self.slab.region
            self.buffer: memoryview | DeviceBytes = self.slab.buffer
            self.tensor = torch.frombuffer(self.slab.buffer, dtype=self._dtype).view(self._shape)
            return
        num_cells = staging_bytes // (2 * self.block_bytes)
        self._area = StagingArea(num_cells, num_blocks * layout.num_layers, lease_s)
        self.staged_cells = self._area.round_cells
        self.slab = transport.allocate("kv", self._area.num_cells * 2 * self.block_bytes)
        self.region, self.buffer = self.slab.region, self.slab.buffer
        try:
            with naming_memory(device, f"{in_binary_units(num_blocks * nbytes)} of KV"):
                memory, handle = device.share_memory(num_blocks * nbytes)
        except BaseException:
            transport.release(self.slab)
            raise
        self.tensor = memory.view(self._dtype).view(self._shape)
        self._unpin = weakref.finalize(self, device.pin_in_place(torch.frombuffer(self.buffer, dtype=torch.uint8)))
        self._unpin.atexit = False
        if shares:
            self._mapped = MappedMemory(device)
            if handle:
                self.region = msgspec.structs.replace(self.region, device=device.type, handle=handle)
        if registers and (registered := register(device, transport, "kv", memory)) is not None:
            self._registered = registered
            self.region, self.buffer = registered.region, registered.buffer
            # all of them: transfers access registered blocks in place
            self.staged_cells = layout.num_layers * num_blocks

    def unpin(self) -> None:
        """Unpin the slab before it is freed and its address reused."""
        if self._unpin is not None:
            self._unpin()

    def release(self, transport: Transport) -> None:
        """Withdraw the memory from peers. Blocks until no other process maps it."""
        self.unpin()
        if self._mapped is not None:
            self._mapped.close()
        if self._registered is not None:
            transport.release(self._registered)
        release_mapped(transport, self.slab)

    @property
    def num_staged(self) -> int:
        return 0 if self._area is None else self._area.num_lent

    def check_integrity(self) -> None:
        if self._area is not None:
            self._area.check_integrity()

    def nbytes(self, num_layers: int, num_blocks: int) -> int:
        return 2 * self.block_bytes * num_layers * num_blocks

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block between the steps launched before and those launched later, on any thread."""
        here = self._device.current_stream()
        here.wait_event(self._steps.record_event())
        self.tensor[:, :, target] = self.tensor[:, :, source]
        self._copied = here.record_event()
        self._steps.wait_event(self._copied)

    # ------------------------------------------------------------------ for peers

    @contextmanager
    def stage(self, layers: range, parts: Sequence[Sequence[int]]) -> Iterator[list[list[Span]]]:
        if self._area is None or self._registered is not None:
            yield self._spans(layers, parts)
            return
        blocks = [block for part in parts for block in part]
        with self._area.leaving.lend(len(layers) * len(blocks)) as first:
            self.copy(layers, blocks, first, lands=False)
            yield self._spans(layers, parts, first)

    @contextmanager
    def land(self, layers: range, parts: Sequence[Sequence[int]]) -> Iterator[list[list[Span]]]:
        if self._area is None or self._registered is not None:
            if self._registered is not None and self._copied is not None:
                self._copied.synchronize()  # it may still read freed blocks
            yield self._spans(layers, parts)
            if self._registered is not None:
                self._device.settle_arrivals()
            return
        blocks = [block for part in parts for block in part]
        with self._area.arriving.lend(len(layers) * len(blocks)) as first:
            yield self._spans(layers, parts, first)
            self.copy(layers, blocks, first, lands=True)

    def _spans(
        self, layers: range, parts: Sequence[Sequence[int]], first_cell: int | None = None
    ) -> list[list[Span]]:
        """Return the spans of each part's blocks in the slab, or in the cells from ``first_cell`` on."""
        if first_cell is None:
            return [slab_spans(layers, part, self.num_blocks, self.block_bytes) for part in parts]
        numbers = iter(range(sum(map(len, parts))))
        return [
            slab_spans(
                range(len(layers)),
                list(islice(numbers, len(part))),
                sum(map(len, parts)),
                self.block_bytes,
                start=first_cell * 2 * self.block_bytes,
            )
            for part in parts
        ]

    def maps(self, region: Region) -> bool:
        """Return whether :meth:`read_mapped` reaches the device's memory of ``region``. Blocks."""
        if self._mapped is None:
            return False
        try:
            with self._mapped.reading(region):
                return True
        except TransferError as error:
            logger.info("the KV of %s cannot be mapped: %s", region.name, error)
            return False

    def read_mapped(self, region: Region, layers: range, source: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy some layers of ``source`` blocks on ``region``'s device to ``blocks``. Raises TransferError."""
        assert self._mapped is not None, "nothing is mapped here"
        with self._mapped.reading(region) as memory:
            other = memory.view(self._dtype).view(*self._shape[:2], -1, *self._shape[3:])
            with self._copying, self._copies:
                there, here = (
                    to_device(torch.tensor(one, dtype=torch.int64), self.tensor.device) for one in (source, blocks)
                )
                if self._copied is not None:
                    self._copies.wait_event(self._copied)  # it may still read freed blocks
                for layer in layers:
                    self.tensor[layer].index_copy_(1, here, other[layer].index_select(1, there))
                done = self._device.record_event()
            done.synchronize()

    # ------------------------------------------------------------------ for preempted sequences

    def save(self, blocks: Sequence[int]) -> Tensor:
        """Return a copy of blocks in host memory: [layers, 2, len(blocks), block_size, kv_heads, head_dim]."""
        self._steps.record_event().synchronize()  # the device may not have written them yet
        if self._area is None:
            return self.tensor[:, :, torch.tensor(blocks)]
        saved = torch.empty((*self._shape[:2], len(blocks), *self._shape[3:]), dtype=self._dtype)
        for layers, part in rounds(range(self.layout.num_layers), len(blocks), self._area.round_cells):
            self.copy(layers, blocks[part.start : part.stop], self._area.saved, lands=False)
            cells = self._cells(self._area.saved, len(layers), len(part))
            saved[layers.start : layers.stop, :, part.start : part.stop] = cells
        return saved

    def restore(self, saved: Tensor, first: int, blocks: Sequence[int]) -> None:
        """Copy saved blocks, from number ``first`` on, to ``blocks``."""
        saved = saved[:, :, first : first + len(blocks)]
        if self._area is None:
            self.tensor[:, :, torch.tensor(blocks)] = saved
            return
        for layers, part in rounds(range(self.layout.num_layers), len(blocks), self._area.round_cells):
            cells = self._cells(self._area.saved, len(layers), len(part))
            cells.copy_(saved[layers.start : layers.stop, :, part.start : part.stop])
            self.copy(layers, blocks[part.start : part.stop], self._area.saved, lands=True)

    # ------------------------------------------------------------------ cells

    def copy(self, layers: range, blocks: Sequence[int], first_cell: int, *, lands: bool) -> None:
        """Copy blocks of some layers, unused by running steps, to cells, or from cells with ``lands``. Blocks.

        Uses a separate stream, which does not wait for layers launched since.
        """
        if not blocks:
            return
        host = self._cells(first_cell, len(layers), len(blocks))
        with self._copying, self._copies:
            numbers = to_device(torch.tensor(blocks), self.tensor.device)
            part = self.tensor[layers.start : layers.stop]
            if lands:
                if self._copied is not None:
                    self._copies.wait_event(self._copied)
                part[:, :, numbers] = host.to(self.tensor.device, non_blocking=True)
            else:
                host.copy_(part[:, :, numbers], non_blocking=True)
            done = self._device.record_event()
        done.synchronize()

    def _cells(self, first: int, num_layers: int, num_blocks: int) -> Tensor:
        """Return the cells from ``first`` on: [num_layers, 2, num_blocks, block_size, kv_heads, head_dim]."""
        shape = (num_layers, 2, num_blocks, *self._shape[3:])
        offset = first * 2 * self.block_bytes
        flat = torch.frombuffer(self.slab.buffer, dtype=self._dtype, count=math.prod(shape), offset=offset)
        return flat.view(shape)


_DEFAULT_KV_BYTES = 1 << 28
#: Number of sequences whose recurrent states get additional memory.
_DEFAULT_STATES = 4
#: Fraction of an accelerator's free memory after loading for steps, features and KV; graphs and fragmentation
#: need the rest.
_FREE_MEMORY_TO_USE = 0.95


def num_kv_blocks(
    options: InstanceOptions,
    layout: KVLayout,
    device_type: str,
    free_bytes: int,
    measure: Callable[[], int],
) -> int:
    """Return the number of blocks for ``free_bytes`` of a device; ``measure`` returns the peak bytes of a step.

    Raises ValueError if ``kv_cache_bytes`` is too small.
    """
    if options.num_blocks is not None:
        return options.num_blocks
    block_bytes = block_nbytes(layout)
    if options.kv_cache_bytes is not None:
        return blocks_in(
            options.kv_cache_bytes,
            block_bytes=block_bytes,
            block_size=layout.block_size,
            state_blocks=layout.state_blocks,
        )
    if device_type == "cpu":
        return max(_DEFAULT_KV_BYTES // block_bytes, MIN_BLOCKS) + _DEFAULT_STATES * layout.state_blocks
    kv_bytes = int(free_bytes * _FREE_MEMORY_TO_USE) - measure() - options.sizes.feature_cache_bytes
    return max(kv_bytes // block_bytes, MIN_BLOCKS)


@contextmanager
def naming_memory(device: Device, purpose: str) -> Iterator[None]:
    """Raise ValueError with the free memory and the remedy if the device lacks memory for ``purpose``."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        total, free = device.memory()
        raise ValueError(
            f"{device.name} lacks memory for {purpose}: {in_binary_units(free)} of {in_binary_units(total)} are "
            "free; stop other processes there, or set memory_share or kv_cache_bytes"
        ) from error


def resolve_dtype(name: str, config: Any, device: Device) -> torch.dtype:
    """Return the dtype of a name; ``auto``: the checkpoint's dtype if the device supports it, otherwise bfloat16.

    A CPU without float16 products uses bfloat16 instead, which is several times as fast at few rows.

    Raises ValueError for a dtype that the device does not support.
    """
    dtype: torch.dtype | str = name
    if name == "auto":
        dtype = getattr(config, "dtype", None) or torch.float32
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    assert isinstance(dtype, torch.dtype)
    if name == "auto":
        is_slow = device.type == "cpu" and dtype is torch.float16 and not multiplies_halves(dtype)
        dtype = torch.bfloat16 if is_slow or dtype not in device.dtypes else dtype
    if dtype not in device.dtypes:
        known = " or ".join(str(one).removeprefix("torch.") for one in device.dtypes)
        named = str(dtype).removeprefix("torch.")
        raise ValueError(f"{device.name} does not support models in {named}; set dtype: {known}")
    return dtype
