"""Storing a step's keys and values into the paged cache, in Triton: both in one launch, from any strides."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor

MANY_TOKENS = 2048
"""From here on a program takes several tokens: there are programs enough, and each keeps more loads in flight."""


@triton.jit(do_not_specialize=["num_tokens"])
def _write_kernel(
    key,
    value,
    keys,
    values,
    slots,
    num_tokens,
    key_token_stride,
    key_head_stride,
    key_dim_stride,
    value_token_stride,
    value_head_stride,
    value_dim_stride,
    block_stride,
    slot_stride,
    head_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``TOKENS`` tokens by ``COLUMNS`` of their ``WIDTH`` (heads * dim) numbers."""
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    present = tokens < num_tokens
    mask = present[:, None] & (columns < WIDTH)[None, :]
    heads, dims = columns // HEAD_DIM, columns % HEAD_DIM
    slot = tl.load(slots + tokens, mask=present, other=0).to(tl.int64)
    key_columns = heads * key_head_stride + dims * key_dim_stride
    value_columns = heads * value_head_stride + dims * value_dim_stride
    k = tl.load(key + (tokens * key_token_stride)[:, None] + key_columns[None, :], mask=mask)
    v = tl.load(value + (tokens * value_token_stride)[:, None] + value_columns[None, :], mask=mask)
    rows = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride
    cells = rows[:, None] + (heads * head_stride + dims)[None, :]
    tl.store(keys + cells, k.to(keys.dtype.element_ty), mask=mask)
    tl.store(values + cells, v.to(values.dtype.element_ty), mask=mask)


def write_kv(key: Tensor, value: Tensor, kv_layer: Tensor, slot_mapping: Tensor) -> None:
    """Store K and V [T, Hkv, D], any strides, into ``kv_layer`` [2, num_blocks, block_size, Hkv, D] at slots [T].

    Numbers are converted to the cache's dtype. D is contiguous in the cache.
    """
    num_tokens, kv_heads, head_dim = key.shape
    assert kv_layer.stride(4) == 1 and slot_mapping.stride(0) == 1
    keys, values = kv_layer.unbind(0)
    width = kv_heads * head_dim
    tokens = 4 if num_tokens >= MANY_TOKENS else 1
    columns = min(triton.next_power_of_2(width), 1024)
    grid = (triton.cdiv(num_tokens, tokens), triton.cdiv(width, columns))
    _write_kernel[grid](
        key,
        value,
        keys,
        values,
        slot_mapping,
        num_tokens,
        *key.stride(),
        *value.stride(),
        *keys.stride()[:3],
        BLOCK_SIZE=kv_layer.shape[2],
        HEAD_DIM=head_dim,
        WIDTH=width,
        TOKENS=tokens,
        COLUMNS=columns,
        num_warps=4,
    )
