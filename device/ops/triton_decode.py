"""Decode attention over a paged KV cache in Triton: split over the context, then merged.

Each program reads one split of one sequence's context for one KV head and serves all query heads that share it
(flash-decoding, Dao et al. 2023). The number of splits depends on the batch's shape alone, and each program
derives its own range from the context length on the device: a captured CUDA graph stays correct as lengths grow.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
MAX_SPLITS = 64
MIN_SPLIT_TOKENS = 128
_PROGRAMS_PER_CORE = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeConfig:
    """The kernel's compile-time choices."""

    tile: int
    """Tokens read at a time by a program, a power of two of at least 16."""
    num_warps: int
    num_stages: int
    """Depth of the software pipeline: shared memory holds ``num_stages - 1`` tiles of K and V."""


def default_config(head_dim: int, itemsize: int) -> DecodeConfig:
    """Return tiles of 16 KiB of K and of V, two in flight: three such programs fit a Hopper multiprocessor.

    Args:
        itemsize: bytes of one cached number.
    """
    tile = 16 * 1024 // (triton.next_power_of_2(max(head_dim, 16)) * itemsize)
    return DecodeConfig(tile=min(max(tile, 16), 64), num_warps=4, num_stages=3)


def count_splits(batch: int, kv_heads: int, max_tokens: int, cores: int) -> int:
    """Return the programs per sequence and KV head, a power of two that fills ``cores`` several times over.

    Args:
        max_tokens: capacity of a block table row in tokens.
    """
    wanted = triton.cdiv(_PROGRAMS_PER_CORE * cores, batch * kv_heads)
    limit = min(max(max_tokens // MIN_SPLIT_TOKENS, 1), MAX_SPLITS)
    return int(min(triton.next_power_of_2(wanted), 1 << (limit.bit_length() - 1)))


@triton.jit
def _span(context, num_splits, TILE: tl.constexpr):
    """Return the tokens of each split but the last, in whole tiles."""
    return tl.cdiv(tl.cdiv(context, num_splits), TILE) * TILE


@triton.jit(do_not_specialize=["num_splits", "table_stride"])
def _split_kernel(
    query,
    keys,
    values,
    block_table,
    context_lens,
    output,
    log_sums,
    scale,
    num_splits,
    query_row_stride,
    query_head_stride,
    query_dim_stride,
    block_stride,
    slot_stride,
    head_stride,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute one split's normalised softmax and the base-2 log of its sum: [row, query head, split, dim]."""
    # Heads vary fastest: concurrent programs read neighbouring bytes of the same slots.
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    context = tl.load(context_lens + row).to(tl.int32)
    span = _span(context, num_splits, TILE)
    start = split * span
    if start >= context:
        return
    end = tl.minimum(start + span, context)

    group = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, HEAD_PAD)
    tile = tl.arange(0, TILE)
    heads = kv_head * GROUP + group
    query_mask = (group[:, None] < GROUP) & (dims[None, :] < HEAD_DIM)
    query_offsets = heads[:, None] * query_head_stride + dims[None, :] * query_dim_stride
    q = tl.load(query + row * query_row_stride + query_offsets, mask=query_mask, other=0.0)
    pages = block_table + row * table_stride
    keys += kv_head * head_stride
    values += kv_head * head_stride

    best = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    result = tl.zeros([GROUP_PAD, HEAD_PAD], tl.float32)
    # Page ids are loaded one tile ahead, so that the loads of K and V can be pipelined.
    page = tl.load(pages + (start + tile) // BLOCK_SIZE, mask=start + tile < end, other=0)
    for first in range(start, end, TILE):
        positions = first + tile
        seen = positions < end
        slots = page.to(tl.int64) * block_stride + (positions % BLOCK_SIZE) * slot_stride
        offsets = slots[:, None] + dims[None, :]
        page = tl.load(pages + (positions + TILE) // BLOCK_SIZE, mask=positions + TILE < end, other=0)
        # Entries past the context may hold garbage, even NaN, and are never loaded.
        mask = seen[:, None] & (dims[None, :] < HEAD_DIM)
        k = tl.load(keys + offsets, mask=mask, other=0.0)
        v = tl.load(values + offsets, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        decay = tl.exp2(best - new_best)
        weights = tl.exp2(scores - new_best[:, None])
        total = total * decay + tl.sum(weights, 1)
        result = tl.dot(weights.to(q.dtype), v, result * decay[:, None], input_precision="ieee")
        best = new_best

    result = result / total[:, None]
    rows = (row * tl.num_programs(0) * GROUP + heads) * num_splits + split
    tl.store(
        output + rows[:, None] * HEAD_DIM + dims[None, :], result.to(output.dtype.element_ty), mask=query_mask
    )
    if num_splits > 1:
        tl.store(log_sums + rows, best + tl.log2(total), mask=group < GROUP)


@triton.jit(do_not_specialize=["num_splits"])
def _merge_kernel(
    partial,
    log_sums,
    context_lens,
    output,
    num_splits,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SOME: tl.constexpr,
    TILE: tl.constexpr,
):
    """Merge the splits of one query head of one row, weighted by their sums, ``SOME`` at a time."""
    row = tl.program_id(1).to(tl.int64)
    head = row * tl.num_programs(0) + tl.program_id(0)
    context = tl.load(context_lens + row).to(tl.int32)
    span = _span(context, num_splits, TILE)
    # Splits beyond the context wrote nothing.
    splits = tl.arange(0, MAX_SPLITS)
    log_sum = tl.load(log_sums + head * num_splits + splits, mask=splits * span < context, other=float("-inf"))
    best = tl.max(log_sum, 0)
    total = tl.sum(tl.exp2(log_sum - best), 0)
    dims = tl.arange(0, HEAD_PAD)
    weighted = tl.zeros([SOME, HEAD_PAD], tl.float32)
    for first in range(0, num_splits, SOME):
        some = first + tl.arange(0, SOME)
        written = some * span < context
        weights = tl.exp2(tl.load(log_sums + head * num_splits + some, mask=written, other=float("-inf")) - best)
        offsets = (head * num_splits + some)[:, None] * HEAD_DIM + dims[None, :]
        mask = written[:, None] & (dims[None, :] < HEAD_DIM)
        results = tl.load(partial + offsets, mask=mask, other=0.0)
        weighted += results * weights[:, None]
    merged = tl.sum(weighted, 0) / total  # not in the loop, where its barriers would wait for each load
    tl.store(output + head * HEAD_DIM + dims, merged.to(output.dtype.element_ty), mask=dims < HEAD_DIM)


def paged_decode(
    query: Tensor,
    kv_layer: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    cores: int,
    config: DecodeConfig | None = None,
    splits: int | None = None,
) -> Tensor:
    """Return the attention of one token per sequence over its whole context.

    Args:
        query: [B, Hq, D], any strides, float16, bfloat16 or float32.
        kv_layer: [2, num_blocks, block_size, Hkv, D] with D contiguous, in the query's dtype.
        block_table: [B, max_blocks] integers, rows contiguous.
        context_lens: [B] integers, at least 1 each.
        cores: multiprocessors to fill.

    Returns:
        [B, Hq, D], contiguous, in the query's dtype.
    """
    batch, query_heads, head_dim = query.shape
    block_size, kv_heads = kv_layer.shape[2:4]
    assert kv_layer.stride(4) == 1 and block_table.stride(1) == 1 and query_heads % kv_heads == 0
    config = config or default_config(head_dim, kv_layer.element_size())
    splits = splits or count_splits(batch, kv_heads, block_table.shape[1] * block_size, cores)
    group, head_pad = query_heads // kv_heads, triton.next_power_of_2(max(head_dim, 16))
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    partial, log_sums = output, output
    if splits > 1:
        partial = torch.empty(batch, query_heads, splits, head_dim, dtype=torch.float32, device=query.device)
        log_sums = torch.empty(batch, query_heads, splits, dtype=torch.float32, device=query.device)
    keys, values = kv_layer.unbind(0)
    _split_kernel[(kv_heads, splits, batch)](
        query,
        keys,
        values,
        block_table,
        context_lens,
        partial,
        log_sums,
        scale * LOG2_E,
        splits,
        *query.stride(),
        *keys.stride()[:3],
        block_table.stride(0),
        BLOCK_SIZE=block_size,
        GROUP=group,
        GROUP_PAD=max(16, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        HEAD_PAD=head_pad,
        TILE=config.tile,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if splits > 1:
        _merge_kernel[(query_heads, batch)](
            partial,
            log_sums,
            context_lens,
            output,
            splits,
            HEAD_DIM=head_dim,
            HEAD_PAD=head_pad,
            MAX_SPLITS=MAX_SPLITS,
            SOME=8,
            TILE=config.tile,
            num_warps=4,
        )
    return output
