"""Attention and layer operators in plain torch, without a loop over decodes: correct on every torch device.

The other backends extend it and fall back to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from device.base import AttentionOps, AttentionPlan, AttnMeta


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillChunk:
    """One prefill chunk: ``num_tokens`` tokens from ``start`` on in the step's batch."""

    start: int
    num_tokens: int
    context_len: int
    blocks: Tensor
    """The blocks of the context, [ceil(context_len / block_size)]."""
    mask: Tensor | None
    """[num_tokens, context_len] to add to the scores; None if plain causality suffices."""

    @property
    def is_whole_context(self) -> bool:
        return self.num_tokens == self.context_len


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainPlan(AttentionPlan):
    """The masks of a step."""

    decode_mask: Tensor | None
    """[num_decodes, 1, 1, max_blocks * block_size] to add to the scores; None without decodes."""
    chunks: tuple[PrefillChunk, ...]


class PlainOps(AttentionOps):
    """torch's own operators."""

    name = "plain torch"

    def prepare(self, meta: AttnMeta, dtype: torch.dtype) -> PlainPlan:
        decode_mask = None
        if meta.num_decodes:
            positions = torch.arange(
                meta.decode_block_table.shape[1] * meta.block_size, device=meta.decode_context_lens.device
            )
            hidden = positions >= meta.decode_context_lens[:, None]
            decode_mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            decode_mask = decode_mask.masked_fill_(hidden, float("-inf"))[:, None, None]
        chunks: list[PrefillChunk] = []
        start = meta.num_decodes
        for i, (query_len, context_len) in enumerate(
            zip(meta.prefill_query_lens, meta.prefill_context_lens, strict=True)
        ):
            num_blocks = -(-context_len // meta.block_size)
            mask = None
            # A single token at the end of its context sees everything; a whole context is SDPA's causal case.
            if 1 < query_len < context_len:
                mask = _causal_mask(query_len, context_len, dtype, meta.prefill_block_table.device)
            chunks.append(
                PrefillChunk(
                    start=start,
                    num_tokens=query_len,
                    context_len=context_len,
                    blocks=meta.prefill_block_table[i, :num_blocks],
                    mask=mask,
                )
            )
            start += query_len
        return PlainPlan(meta=meta, decode_mask=decode_mask, chunks=tuple(chunks))

    def write_kv(self, key: Tensor, value: Tensor, kv_layer: Tensor, slot_mapping: Tensor) -> None:
        keys, values = kv_layer.flatten(1, 2).unbind(0)
        keys.index_copy_(0, slot_mapping, key)
        values.index_copy_(0, slot_mapping, value)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, kv_layer: Tensor, plan: AttentionPlan, scale: float
    ) -> Tensor:
        assert isinstance(plan, PlainPlan), "a plan serves the operators that prepared it"
        num_decodes = plan.meta.num_decodes
        output = query.new_empty(query.shape)
        if plan.decode_mask is not None:
            output[:num_decodes] = self._decode(query[:num_decodes], kv_layer, plan, scale)
        for chunk in plan.chunks:
            tokens = slice(chunk.start, chunk.start + chunk.num_tokens)
            if chunk.is_whole_context:
                keys, values = key[tokens], value[tokens]
            else:
                keys, values = _gather(kv_layer, chunk.blocks)
                keys, values = keys[: chunk.context_len], values[: chunk.context_len]
            output[tokens] = _attend(query[tokens], keys, values, chunk.mask, chunk.is_whole_context, scale)
        return output

    def _decode(self, query: Tensor, kv_layer: Tensor, plan: PlainPlan, scale: float) -> Tensor:
        """Return attention [B, Hq, D] over the gathered pages of all B sequences at once."""
        batch, query_heads, head_dim = query.shape
        kv_heads = kv_layer.shape[3]
        assert plan.decode_mask is not None
        # entries past a context may hold garbage, even NaN
        hidden = plan.decode_mask.view(batch, -1, 1, 1) < 0
        keys, values = (
            pages.view(batch, -1, kv_heads, head_dim).masked_fill_(hidden, 0).transpose(1, 2)
            for pages in _gather(kv_layer, plan.meta.decode_block_table.reshape(-1))
        )
        # Query heads of one KV head become query positions: this avoids repeating K/V and suits any SDPA kernel.
        folded = query.reshape(batch, kv_heads, query_heads // kv_heads, head_dim)
        output = F.scaled_dot_product_attention(folded, keys, values, attn_mask=plan.decode_mask, scale=scale)
        return output.reshape(batch, query_heads, head_dim)

    def encode(
        self, query: Tensor, key: Tensor, value: Tensor, cu_seqlens_host: Sequence[int], scale: float
    ) -> Tensor:
        outputs: list[Tensor] = []
        start = 0
        # Neighbours of one length (video frames, windows) are one batch.
        lengths = [end - begin for begin, end in pairwise(cu_seqlens_host)]
        for length, run in groupby(lengths):
            count = len(list(run))
            tokens = slice(start, start + count * length)
            queries, keys, values = (
                states[tokens].reshape(count, length, *states.shape[1:]).transpose(1, 2)
                for states in (query, key, value)
            )
            attended = F.scaled_dot_product_attention(queries, keys, values, scale=scale)
            outputs.append(attended.transpose(1, 2).flatten(0, 1))
            start += count * length
        if len(outputs) == 1:
            return outputs[0].contiguous()
        return torch.cat(outputs) if outputs else query.new_empty(query.shape)

    def rms_norm(self, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return F.rms_norm(hidden, (hidden.shape[-1],), weight, epsilon)

    def add_rms_norm(
        self, hidden: Tensor, residual: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        total = hidden + residual
        return self.rms_norm(total, weight, epsilon), total

    def rotary(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.to(query.dtype)[:, None], sin.to(query.dtype)[:, None]
        return query * cos + _rotate_half(query) * sin, key * cos + _rotate_half(key) * sin

    def swiglu(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


def _causal_mask(query_len: int, context_len: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a mask of 0 up to position ``context_len - query_len + i`` of token i, and minus infinity beyond."""
    everything = torch.full((query_len, context_len), float("-inf"), dtype=dtype, device=device)
    return everything.triu_(context_len - query_len + 1)


def _gather(kv_layer: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return K and V of the blocks, token by token: [len(blocks) * block_size, Hkv, D] each."""
    keys, values = kv_layer.unbind(0)
    return keys.index_select(0, blocks).flatten(0, 1), values.index_select(0, blocks).flatten(0, 1)


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    """Attend from one chunk [n, Hq, D] to its context [m, Hkv, D]."""
    output = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    return output[0].transpose(0, 1)


def _rotate_half(states: Tensor) -> Tensor:
    first, second = states.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotary_tables(
    positions: Tensor, frequencies: Tensor, axes: Tensor | None = None, scaling: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines for ``AttentionOps.rotary``.

    Args:
        positions: [1, T], or [3, T] (time, height, width) with ``axes``.
        frequencies: [D / 2] float32, radians from one position to the next.
        axes: :func:`position_axes`.
        scaling: factor on both.

    Returns:
        cos, sin: [T, D] float32, the second half repeating the first.
    """
    if len(positions) == 1:
        turned = positions[0, :, None]
    else:
        assert axes is not None, "several position axes require axes"
        turned = positions[axes].T
    angles = turned.float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if scaling == 1.0 else (cos * scaling, sin * scaling)


def position_axes(sections: Sequence[int], *, interleaved: bool = False) -> Tensor:
    """Return the position axis of each frequency: [D / 2] of 0 (time), 1 (height), 2 (width).

    Args:
        sections: frequencies per axis (M-RoPE; Qwen2-VL paper, 2.1).
        interleaved: the axes alternate along the frequencies (Qwen3-VL) instead of forming three runs; frequencies
            left by height and width belong to time.
    """
    time, height, width = sections
    index = torch.arange(time + height + width)
    if not interleaved:
        return (index >= time).long() + (index >= time + height).long()
    axis = index % 3
    return ((axis == 1) & (index < 3 * height)).long() + 2 * ((axis == 2) & (index < 3 * width)).long()
