"""The KV cache itself: one registered slab, seen as a tensor by the model and as byte ranges by the transport."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from device.base import Device
from epd_serve.protocol.wire import KVLayout, Region
from epd_serve.transfer.transport import Piece, Transport


def block_nbytes(layout: KVLayout, dtype: torch.dtype) -> int:
    """Bytes of one block: K and V of all its tokens in all layers."""
    return 2 * layout.num_layers * layout.block_size * layout.num_kv_heads * layout.head_dim * dtype.itemsize


class KVMemory:
    """[layers, 2, num_blocks, block_size, kv_heads, head_dim]: each layer contiguous, block 0 scratch.

    On a CPU the slab *is* the cache, and peers write into it. An accelerator's cache lives on the accelerator; the
    slab is where peers land bytes (:meth:`land`) and where outgoing bytes are staged (:meth:`pieces`).
    """

    def __init__(
        self, layout: KVLayout, num_blocks: int, dtype: torch.dtype, device: Device, transport: Transport
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        shape = (layout.num_layers, 2, num_blocks, layout.block_size, layout.num_kv_heads, layout.head_dim)
        self.block_bytes = block_nbytes(layout, dtype) // (2 * layout.num_layers)  # K or V of one layer
        slab = transport.allocate("kv", num_blocks * block_nbytes(layout, dtype))
        self.region: Region = slab.region
        self._bytes = slab.buffer
        self._host = torch.frombuffer(slab.buffer, dtype=dtype).view(shape)
        self._on_host = device.torch_device.type == "cpu"
        self.tensor: Tensor = (
            self._host if self._on_host else torch.zeros(shape, dtype=dtype, device=device.torch_device)
        )

    def copy_block(self, source: int, target: int) -> None:
        self.tensor[:, :, target] = self.tensor[:, :, source]

    def pieces(
        self, layers: range, local: Sequence[int], remote: Sequence[int], remote_num_blocks: int
    ) -> list[Piece]:
        """Bytes of ``local`` blocks in ``layers``, and where they belong in a slab of ``remote_num_blocks``."""
        if not self._on_host:
            blocks = torch.tensor(local, device=self.tensor.device)
            part = slice(layers.start, layers.stop)
            host_blocks = torch.tensor(local)
            self._host[part, :, host_blocks] = self.tensor[part, :, blocks].cpu()
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

    def land(self, blocks: Sequence[int]) -> None:
        """Bring blocks that a peer wrote into the slab to where the model reads them."""
        if not self._on_host:
            host_blocks = torch.tensor(blocks)
            self.tensor[:, :, host_blocks.to(self.tensor.device)] = self._host[:, :, host_blocks].to(
                self.tensor.device
            )


def _merge_runs(local: Sequence[int], remote: Sequence[int]) -> list[tuple[int, int, int]]:
    """(local block, remote block, count) of the runs that are consecutive on both sides."""
    runs: list[tuple[int, int, int]] = []
    for here, there in zip(local, remote, strict=True):
        if runs and (here, there) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((here, there, 1))
    return runs
