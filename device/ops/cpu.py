"""CPU operators: plain torch in the formulations that measured fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor

from device.base import AttentionPlan, AttnMeta
from device.ops.cpu_kernels import amx_kernels, cpu_kernels
from device.ops.plain import PlainOps

#: Bytes of a norm's input per pass and thread, small enough for a core's cache.
_NORM_BYTES = 1 << 18
_ARGMAX_PARTS = 128
#: Compute dtype of attention if it differs from the input's: torch's float16 kernels are slow.
_INNER = {torch.float16: torch.float32}


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeTile:
    """Consecutive decodes of the plan with similar lengths."""

    rows: slice
    blocks: Tensor
    """[rows * width], ``width`` blocks per row."""
    context_len: int
    """Longest context; keys beyond it are dropped."""
    mask: Tensor | None
    """[rows, 1, 1, context_len] to add to the scores; None if all contexts have equal length."""
    hidden: Tensor | None
    """Gathered tokens past a context, which may hold garbage, even NaN."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuPlan(AttentionPlan):
    """A step's decodes by ascending length, and its causal mask."""

    dtype: torch.dtype
    context_lens: list[int]
    """Per decode, ascending."""
    block_table: Tensor
    """[num_decodes, max_blocks], in the order of ``context_lens``."""
    order: Tensor | None
    """[num_decodes]: permutation of the step's decodes; None if they are already sorted."""
    mask: Tensor | None
    """[rows, context] to add to the scores. Token i of the last n of m sees up to ``m - n + i``, so the lower
    right corner [n, m] serves every chunk. None if no chunk needs it."""
    tiles: dict[int, list[DecodeTile]] = field(default_factory=dict)
    """By the bytes of a block, created by the first layer."""


class CpuOps(PlainOps):
    """Operators for float32, bfloat16 and float16 on a CPU.

    Args:
        tile_bytes: K/V gathered at once by decodes, per thread: small enough to stay in a core's cache.
        query_rows: tokens of a chunk that attend at once and skip the keys after their last one.
    """

    name = "plain torch (CPU)"

    def __init__(self, *, tile_bytes: int = 2 << 20, query_rows: int = 256) -> None:
        self._tile_bytes = tile_bytes
        self._query_rows = query_rows
        # A step's cosines, and the factors [T, 1, D] of the states and of the swapped halves, shared by all
        # layers.
        self._last_turns = (torch.empty(0),) * 3

    def prepare(self, meta: AttnMeta, dtype: torch.dtype) -> CpuPlan:  # type: ignore[override]
        lens = meta.decode_context_lens.tolist()
        order: Tensor | None = None
        table = meta.decode_block_table
        if any(before > after for before, after in pairwise(lens)):
            order = torch.tensor(sorted(range(len(lens)), key=lens.__getitem__))
            table = table.index_select(0, order)
            lens.sort()
        partial = [
            (query, context)
            for query, context in zip(meta.prefill_query_lens, meta.prefill_context_lens, strict=True)
            if 1 < query < context
        ]
        inner, mask = _INNER.get(dtype, dtype), None
        if partial:
            rows = min(self._query_rows, max(query for query, _ in partial))
            columns = max(context for _, context in partial)
            mask = torch.full((rows, columns), float("-inf"), dtype=inner).triu_(columns - rows + 1)
        return CpuPlan(meta=meta, dtype=inner, context_lens=lens, block_table=table, order=order, mask=mask)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, kv_layer: Tensor, plan: AttentionPlan, scale: float
    ) -> Tensor:
        assert isinstance(plan, CpuPlan), "a plan serves the operators that prepared it"
        meta = plan.meta
        start = meta.num_decodes
        if start == len(query) and start > 0:
            return self._decode_all(query, kv_layer, plan, scale)
        output = query.new_empty(query.shape)
        if start:
            output[:start] = self._decode_all(query[:start], kv_layer, plan, scale)
        chunks = zip(meta.prefill_query_lens, meta.prefill_context_lens, meta.prefill_block_table, strict=True)
        for query_len, context_len, block_table in chunks:
            tokens = slice(start, start + query_len)
            start += query_len
            if query_len == context_len:
                output[tokens] = _attend(query[tokens], key[tokens], value[tokens], None, True, scale)
                continue
            blocks = block_table[: -(-context_len // meta.block_size)]
            keys, values = (pages.index_select(0, blocks).flatten(0, 1) for pages in kv_layer.unbind(0))
            if query_len == 1:
                one = keys[None, :context_len], values[None, :context_len]
                output[tokens] = _attend_last(query[tokens], *one, None, scale)
                continue
            assert plan.mask is not None
            for first in range(0, query_len, self._query_rows):
                end = min(first + self._query_rows, query_len)
                seen = context_len - query_len + end
                output[tokens][first:end] = _attend(
                    query[tokens][first:end],
                    keys[:seen],
                    values[:seen],
                    plan.mask[plan.mask.shape[0] - (end - first) :, plan.mask.shape[1] - seen :],
                    False,
                    scale,
                )
        return output

    def _decode_all(self, query: Tensor, kv_layer: Tensor, plan: CpuPlan, scale: float) -> Tensor:
        """Return attention [B, Hq, D] of the decodes, tile by tile: gathered K/V are still in the core's cache."""
        for kernels in (amx_kernels(), cpu_kernels()):
            if kernels is not None and kernels.takes_decodes(query, kv_layer):
                return kernels.decode(query, kv_layer, plan.meta, scale)
        _, _, block_size, kv_heads, head_dim = kv_layer.shape
        block_bytes = 2 * block_size * kv_heads * head_dim * kv_layer.element_size()
        tiles = plan.tiles.get(block_bytes)
        if tiles is None:
            tiles = plan.tiles[block_bytes] = _tiles(
                plan, self._tile_bytes * torch.get_num_threads() // block_bytes
            )
        if plan.order is not None:
            query = query.index_select(0, plan.order)
        results: list[Tensor] = []
        for tile in tiles:
            queries = query if len(tiles) == 1 else query[tile.rows]
            gathered = [pages.index_select(0, tile.blocks).flatten(0, 1) for pages in kv_layer.unbind(0)]
            if tile.hidden is not None:
                gathered = [states.index_fill_(0, tile.hidden, 0) for states in gathered]
            keys, values = (
                states.view(len(queries), -1, kv_heads, head_dim)[:, : tile.context_len] for states in gathered
            )
            results.append(_attend_last(queries, keys, values, tile.mask, scale))
        output = results[0] if len(results) == 1 else torch.cat(results)
        return output if plan.order is None else torch.empty_like(output).index_copy_(0, plan.order, output)

    def encode(
        self, query: Tensor, key: Tensor, value: Tensor, cu_seqlens_host: Sequence[int], scale: float
    ) -> Tensor:
        inner = _INNER.get(query.dtype, query.dtype)
        output = super().encode(query.to(inner), key.to(inner), value.to(inner), cu_seqlens_host, scale)
        return output.to(query.dtype)

    def rms_norm(self, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        kernels = cpu_kernels()
        if kernels is not None and kernels.takes_norm(hidden, weight):
            return kernels.rms_norm(hidden, weight, epsilon)
        rows = _NORM_BYTES * torch.get_num_threads() // (hidden.shape[1:].numel() * hidden.element_size())
        if len(hidden) <= rows:
            return F.rms_norm(hidden, weight.shape, weight, epsilon)
        parts = torch.split(hidden, rows)
        return torch.cat([F.rms_norm(part, weight.shape, weight, epsilon) for part in parts])

    def add_rms_norm(
        self, hidden: Tensor, residual: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        kernels = cpu_kernels()
        if kernels is not None and kernels.takes_norm(hidden, weight):
            return kernels.add_rms_norm(hidden, residual, weight, epsilon)
        total = hidden + residual
        return self.rms_norm(total, weight, epsilon), total

    def rotary(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        kernels = cpu_kernels()
        if kernels is not None and kernels.takes_rotary(query, cos, sin) and kernels.takes_rotary(key, cos, sin):
            return kernels.rotary(query, cos, sin), kernels.rotary(key, cos, sin)
        # One pass over both: a decode step is bound by the number of operators, not their size.
        states = torch.cat((query, key), dim=1)
        known, factor, turn = self._last_turns
        if known is not cos or factor.dtype != states.dtype:
            first, second = sin.chunk(2, dim=-1)
            signed = torch.cat((first.neg(), second), dim=-1)
            factor, turn = (table.to(states.dtype)[:, None] for table in (cos, signed))
            self._last_turns = cos, factor, turn
        rotated = (states * factor).addcmul_(states.roll(states.shape[-1] // 2, dims=-1), turn)
        return rotated[:, : query.shape[1]], rotated[:, query.shape[1] :]

    def swiglu(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def argmax(self, logits: Tensor) -> Tensor:
        # torch vectorises the maximum but not its index: find the part with the maximum, then the index within.
        num_parts = gcd(logits.shape[-1], _ARGMAX_PARTS)
        if num_parts < _ARGMAX_PARTS // 8 or not len(logits):
            return logits.max(dim=-1).indices
        parts = logits.view(len(logits), num_parts, -1)
        best = parts.amax(dim=-1).max(dim=-1).indices
        inside = parts[torch.arange(len(parts)), best].max(dim=-1).indices
        index: Tensor = best * parts.shape[-1] + inside
        return index


def _tiles(plan: CpuPlan, max_blocks: int) -> list[DecodeTile]:
    """Cut the decodes, shortest first, into tiles of ``max_blocks``, at most an eighth of it padding.

    A longer sequence gets a tile of its own. This much padding costs less than another tile.
    """
    block_size = plan.meta.block_size
    widths = [-(-length // block_size) for length in plan.context_lens]
    tiles: list[DecodeTile] = []
    first = owned = 0
    for end, width in enumerate(widths, start=1):
        owned += width
        if end < len(widths):
            gathered = (end + 1 - first) * widths[end]
            if gathered <= max_blocks and gathered - owned - widths[end] <= max_blocks // 8:
                continue
        rows, mask, hidden = slice(first, end), None, None
        lens = plan.context_lens[rows]
        if lens[0] < lens[-1]:
            is_hidden = torch.arange(width * block_size) >= torch.tensor(lens)[:, None]
            mask = torch.zeros(is_hidden.shape, dtype=plan.dtype).masked_fill_(is_hidden, float("-inf"))
            mask = mask[:, None, None, : lens[-1]]
            hidden = is_hidden.flatten().nonzero().squeeze(1)
        blocks = plan.block_table[rows, :width].reshape(-1)
        tiles.append(DecodeTile(rows=rows, blocks=blocks, context_len=lens[-1], mask=mask, hidden=hidden))
        first, owned = end, 0
    return tiles


def _attend_last(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attend from the last token of B sequences [B, Hq, D] to their contexts [B, S, Hkv, D]; contiguous result."""
    batch, query_heads, head_dim = query.shape
    kv_heads = keys.shape[2]
    inner = _INNER.get(query.dtype, query.dtype)
    # The query heads of one KV head become query positions, which avoids repeating K/V.
    folded = query.reshape(batch, kv_heads, query_heads // kv_heads, head_dim).to(inner)
    # With a single position torch takes a bfloat16 path at a third of the speed.
    is_single = inner == torch.bfloat16 and query_heads == kv_heads
    output = F.scaled_dot_product_attention(
        folded.expand(-1, -1, 2, -1) if is_single else folded,
        keys.transpose(1, 2).to(inner),
        values.transpose(1, 2).to(inner),
        attn_mask=mask,
        scale=scale,
    )
    output = output[:, :, :1] if is_single else output
    return output.reshape(batch, query_heads, head_dim).to(query.dtype).contiguous()


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    """Attend from tokens [n, Hq, D] of one sequence to their context [m, Hkv, D]."""
    inner = _INNER.get(query.dtype, query.dtype)
    queries, keys, values = (states.transpose(0, 1)[None].to(inner) for states in (query, keys, values))
    has_groups = queries.shape[1] != keys.shape[1]
    output = F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=has_groups
    )
    return output[0].transpose(0, 1)
