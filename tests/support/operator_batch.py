"""A random step of a serving engine, with everything in memory that a wrong operator would trip over."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor

from device.base import AttentionOps, AttnMeta

Layout = Literal["contiguous", "heads first", "fused", "every second"]
"""How inputs lie in memory: [T, H, D] itself; a transposed [H, T, D]; slices of one [T, all heads, D] projection;
every second number along D."""
LAYOUTS: tuple[Layout, ...] = get_args(Layout)


class Batch:
    """One mixed step with random contents: decodes, rows of padding, then prefill chunks.

    Blocks lie in any order. Memory that no sequence owns is NaN, so an operator that reads it gives itself away;
    so is the unused end of a sequence's last block, unless ``leftovers`` says what an earlier owner left there.

    Args:
        decodes: the context length of each.
        prefills: (query, context) lengths of each chunk.
        padding: decodes of context 1 that read and write block 0, as a captured graph's unused rows do.
        spare_columns: number of columns of 0 that the block tables have beyond the longest sequence.
    """

    def __init__(
        self,
        decodes: Sequence[int],
        prefills: Sequence[tuple[int, int]],
        *,
        block_size: int,
        kv_heads: int,
        group: int,
        head_dim: int,
        seed: int,
        padding: int = 0,
        spare_columns: int = 1,
        layout: Layout = "contiguous",
        leftovers: float = float("nan"),
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.layout: Layout = layout
        self.num_decodes, self.padding = len(decodes), padding
        self.sequences = [(1, context) for context in decodes] + [(1, 1)] * padding + list(prefills)
        pads = range(len(decodes), len(decodes) + padding)
        num_blocks = [
            0 if i in pads else -(-context // block_size) for i, (_, context) in enumerate(self.sequences)
        ]
        order = (torch.randperm(sum(num_blocks), generator=generator) + 1).tolist()
        self.blocks = [[order.pop() for _ in range(count)] for count in num_blocks]
        shape = (kv_heads, head_dim)
        self.kv_layer = torch.full((2, sum(num_blocks) + 2, block_size, *shape), float("nan"))
        self.kv_layer[:, 0] = 9.0
        # Per sequence: K and V of its whole context, [2, context, Hkv, D].
        self.dense: list[Tensor] = []
        slots: list[int] = []
        states: list[Tensor] = [torch.empty(2, 0, *shape)]
        for (query_len, context), blocks in zip(self.sequences, self.blocks, strict=True):
            dense = torch.randn(2, context, *shape, generator=generator)
            where = [
                blocks[p // block_size] * block_size + p % block_size for p in range(context if blocks else 0)
            ]
            if not blocks:  # of padding, each its own
                where = [(len(slots) - len(decodes)) % block_size]
            past = context - query_len
            self.kv_layer[:, blocks] = leftovers
            self.kv_layer.flatten(1, 2)[:, where[:past]] = dense[:, :past]
            slots += where[past:]
            states.append(dense[:, past:])
            self.dense.append(dense)
        self.key, self.value = torch.cat(states, dim=1).unbind(0)
        self.query = torch.randn(len(slots), kv_heads * group, head_dim, generator=generator)
        self.scale = head_dim**-0.5
        width = max(num_blocks, default=0) + max(1, spare_columns)
        # A step's tables are often slices of larger static ones: rows need not lie side by side.
        table = torch.zeros(len(num_blocks), width + 3, dtype=torch.int32)
        for row, blocks in zip(table, self.blocks, strict=True):
            row[: len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        table = table[:, :width]
        contexts = [context for _, context in self.sequences[: len(decodes) + padding]]
        self.meta = AttnMeta(
            block_size=block_size,
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            num_decodes=len(contexts),
            decode_block_table=table[: len(contexts)],
            decode_context_lens=torch.tensor(contexts, dtype=torch.int64),
            decode_context_lens_host=contexts,
            prefill_query_lens=[query for query, _ in prefills],
            prefill_context_lens=[context for _, context in prefills],
            prefill_block_table=table[len(contexts) :],
        )

    def meta_on(self, device: torch.device) -> AttnMeta:
        meta = self.meta
        return replace(
            meta,
            slot_mapping=meta.slot_mapping.to(device),
            decode_block_table=_moved_rows(meta.decode_block_table, device),
            decode_context_lens=meta.decode_context_lens.to(device),
            prefill_block_table=_moved_rows(meta.prefill_block_table, device),
        )

    def run(
        self, ops: AttentionOps, dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> tuple[Tensor, Tensor]:
        """The output [T, Hq, D] and the cache after it, both where they were computed."""
        device = device or torch.device("cpu")
        meta = self.meta_on(device)
        states = [tensor.to(device, dtype) for tensor in (self.query, self.key, self.value)]
        query, key, value = lay_out(states, self.layout)
        kv_layer = self.kv_layer.to(device, dtype, copy=True)
        plan = ops.prepare(meta, dtype)
        ops.write_kv(key, value, kv_layer, meta.slot_mapping)
        return ops.attend(query, key, value, kv_layer, plan, self.scale), kv_layer

    def rounded(self, dtype: torch.dtype) -> Batch:
        """Return the step with its numbers rounded to ``dtype``, in float32."""
        other = copy(self)
        other.query, other.key, other.value, other.kv_layer = (
            tensor.to(dtype).float() for tensor in (self.query, self.key, self.value, self.kv_layer)
        )
        other.dense = [tensor.to(dtype).float() for tensor in self.dense]
        return other


def lay_out(states: Sequence[Tensor], layout: Layout) -> list[Tensor]:
    """Return tensors [T, ..., D] with the same numbers in the layout's strides."""
    if layout == "heads first" and states[0].dim() == 3:
        return [state.transpose(0, 1).contiguous().transpose(0, 1) for state in states]
    if layout == "fused":
        return list(torch.split(torch.cat(list(states), dim=1), [state.shape[1] for state in states], dim=1))
    if layout == "every second":
        return [torch.stack((state, state), dim=-1).flatten(-2)[..., ::2] for state in states]
    return list(states)


def _moved_rows(table: Tensor, device: torch.device) -> Tensor:
    """The table on the device, its rows as far apart as they were."""
    wide = torch.zeros(table.shape[0], table.stride(0), dtype=table.dtype, device=device)
    wide[:, : table.shape[1]] = table.to(device)
    return wide[:, : table.shape[1]]
