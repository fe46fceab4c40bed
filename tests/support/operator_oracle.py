"""The oracle: every operator in the fewest obvious lines, one sequence and one head at a time, in float32.

Tests compare the backends with it; nothing serves with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from device.base import AttentionOps, AttentionPlan, AttnMeta


class ReferenceOps(AttentionOps):
    """Slow on purpose."""

    name = "reference"

    def prepare(self, meta: AttnMeta, dtype: torch.dtype) -> AttentionPlan:
        return AttentionPlan(meta=meta)

    def write_kv(self, key: Tensor, value: Tensor, kv_layer: Tensor, slot_mapping: Tensor) -> None:
        block_size = kv_layer.shape[2]
        for token, slot in enumerate(slot_mapping.tolist()):
            kv_layer[0, slot // block_size, slot % block_size] = key[token]
            kv_layer[1, slot // block_size, slot % block_size] = value[token]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, kv_layer: Tensor, plan: AttentionPlan, scale: float
    ) -> Tensor:
        meta = plan.meta
        decodes = zip(
            [1] * meta.num_decodes, meta.decode_context_lens.tolist(), meta.decode_block_table, strict=True
        )
        prefills = zip(meta.prefill_query_lens, meta.prefill_context_lens, meta.prefill_block_table, strict=True)
        outputs: list[Tensor] = []
        start = 0
        for query_len, context_len, block_table in (*decodes, *prefills):
            positions = range(context_len)
            keys = torch.stack([_cached(kv_layer[0], block_table, position) for position in positions])
            values = torch.stack([_cached(kv_layer[1], block_table, position) for position in positions])
            for i in range(query_len):
                seen = context_len - query_len + i + 1
                outputs.append(_attend_one(query[start + i], keys[:seen], values[:seen], scale))
            start += query_len
        return torch.stack(outputs) if outputs else query.new_empty(query.shape)

    def encode(
        self, query: Tensor, key: Tensor, value: Tensor, cu_seqlens_host: Sequence[int], scale: float
    ) -> Tensor:
        outputs: list[Tensor] = []
        for start, end in pairwise(cu_seqlens_host):
            outputs += [_attend_one(query[i], key[start:end], value[start:end], scale) for i in range(start, end)]
        return torch.stack(outputs) if outputs else query.new_empty(query.shape)

    def rms_norm(self, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        exact = hidden.float()
        variance = (exact * exact).mean(dim=-1, keepdim=True)
        return (exact / torch.sqrt(variance + epsilon) * weight.float()).to(hidden.dtype)

    def add_rms_norm(
        self, hidden: Tensor, residual: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        total = hidden + residual
        return self.rms_norm(total, weight, epsilon), total

    def rotary(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return _rotate(query, cos, sin), _rotate(key, cos, sin)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        width = gate_up.shape[-1] // 2
        gate, up = gate_up[..., :width].float(), gate_up[..., width:].float()
        return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def _cached(cache: Tensor, block_table: Tensor, position: int) -> Tensor:
    """One token's K or V, [Hkv, D], out of [num_blocks, block_size, Hkv, D]."""
    block_size = cache.shape[1]
    return cache[int(block_table[position // block_size]), position % block_size]


def _attend_one(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """One token [Hq, D] over what it sees [S, Hkv, D]."""
    group = query.shape[0] // keys.shape[1]
    heads: list[Tensor] = []
    for head in range(query.shape[0]):
        scores = keys[:, head // group].float() @ query[head].float() * scale
        heads.append(torch.softmax(scores, dim=0) @ values[:, head // group].float())
    return torch.stack(heads).to(query.dtype)


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair (x_i, x_{i + D/2}) of [T, H, D] turned by its angle."""
    half = states.shape[-1] // 2
    first, second = states[..., :half].float(), states[..., half:].float()
    cos, sin = cos[:, None, :half].float(), sin[:, None, :half].float()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(states.dtype)
