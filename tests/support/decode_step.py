"""A decode step on static buffers, small enough to compare a captured run of it with an eager one."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from device.base import AttentionOps, AttnMeta

BLOCK_SIZE, WIDTH, KV_HEADS, HEADS, HEAD_DIM, LAYERS = 16, 4, 2, 4, 128, 3


class DecodeStep:
    """Static buffers of a decode step of some layers, each writing its cache and attending."""

    def __init__(
        self, ops: AttentionOps, size: int, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ops = ops
        blocks = 1 + size * WIDTH
        states = torch.randn(size, HEADS + 2 * KV_HEADS, HEAD_DIM, generator=generator)
        kv = torch.randn(LAYERS, 2, blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM, generator=generator)
        self.dtype = dtype
        self.states, self.kv = states.to(device, dtype), kv.to(device, dtype)
        self.meta = AttnMeta(
            block_size=BLOCK_SIZE,
            slot_mapping=torch.arange(size, device=device),
            num_decodes=size,
            decode_block_table=torch.arange(1, blocks, device=device, dtype=torch.int32).view(size, WIDTH),
            decode_context_lens=torch.ones(size, dtype=torch.int64, device=device),
            decode_context_lens_host=[1] * size,
            prefill_query_lens=[],
            prefill_context_lens=[],
            prefill_block_table=torch.zeros(0, 1, dtype=torch.int32, device=device),
        )

    def fill(self, context_lens: list[int]) -> None:
        """The inputs that the engine copies into the buffers before a replay."""
        self.meta.decode_context_lens.copy_(torch.tensor(context_lens))
        last = self.meta.decode_context_lens - 1
        block = self.meta.decode_block_table.gather(1, (last // BLOCK_SIZE)[:, None])[:, 0]
        self.meta.slot_mapping.copy_(block * BLOCK_SIZE + last % BLOCK_SIZE)

    def run(self, meta: AttnMeta | None = None) -> Tensor:
        meta = meta or self.meta
        plan = self.ops.prepare(meta, self.dtype)
        query, key, value = self.states.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        for kv_layer in self.kv:
            self.ops.write_kv(key, value, kv_layer, meta.slot_mapping)
            query = query + self.ops.attend(query, key, value, kv_layer, plan, HEAD_DIM**-0.5)
        return query

    def eager(self, context_lens: list[int]) -> Tensor:
        return self.run(replace(self.meta, decode_context_lens_host=context_lens))
