"""Small operators between the matrix products, in Triton: one launch each, compared to torch's two to a dozen.

They include the cache write of keys and values from any strides. Each reads its operands once and rounds once,
which saves memory traffic and, in a decode step, launches.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    hidden,
    residual,
    weight,
    normed,
    total,
    num_rows,
    inner,
    outer_stride,
    inner_stride,
    residual_outer_stride,
    residual_inner_stride,
    epsilon,
    HAS_RESIDUAL: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Normalise ``ROWS`` rows; row r of the output is row (r // inner, r % inner) of the input."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH_PAD)
    mask = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    outer, within = rows // inner, rows % inner
    x = tl.load(hidden + (outer * outer_stride + within * inner_stride)[:, None] + columns, mask=mask, other=0.0)
    cells = (rows * WIDTH)[:, None] + columns
    if HAS_RESIDUAL:
        places = (outer * residual_outer_stride + within * residual_inner_stride)[:, None] + columns
        before = tl.load(residual + places, mask=mask, other=0.0)
        # Rounded to the dtype first: the norm sees the next layer's residual.
        x = (x.to(tl.float32) + before.to(tl.float32)).to(hidden.dtype.element_ty)
        tl.store(total + cells, x, mask=mask)
    x = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / WIDTH + epsilon)
    w = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    tl.store(normed + cells, (x * scale[:, None] * w[None, :]).to(normed.dtype.element_ty), mask=mask)


@triton.jit
def _rotate_kernel(
    states,
    rotated,
    cos,
    sin,
    token_stride,
    head_stride,
    cos_stride,
    sin_stride,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    """Rotate all heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, HEADS_PAD)
    dims = tl.arange(0, HALF_PAD)
    mask = (heads < HEADS)[:, None] & (dims < HALF)[None, :]
    first = states + token * token_stride + heads[:, None] * head_stride + dims[None, :]
    x = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(first + HALF, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + token * cos_stride + dims, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + token * sin_stride + dims, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    out = rotated + token * (HEADS * HALF * 2) + heads[:, None] * (HALF * 2) + dims[None, :]
    tl.store(out, (x * c - y * s).to(rotated.dtype.element_ty), mask=mask)
    tl.store(out + HALF, (y * c + x * s).to(rotated.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_kernel(gate_up, output, row_stride, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute ``COLUMNS`` of one row's ``WIDTH`` results."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < WIDTH
    gate = tl.load(gate_up + row * row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(
        output + row * WIDTH + columns, (gate / (1 + tl.exp(-gate)) * up).to(output.dtype.element_ty), mask=mask
    )


def rms_norm(
    hidden: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor | None]:
    """Return the norm of ``hidden`` [..., D], or the norm of ``hidden + residual`` and that sum."""
    rows = _as_rows(hidden)
    before = rows if residual is None else _as_rows(residual)
    width, num_rows = hidden.shape[-1], rows.shape[0] * rows.shape[1]
    normed = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    total = None if residual is None else torch.empty_like(normed)
    padded = triton.next_power_of_2(width)
    # Short rows (one head's norm) share a program, to keep its threads busy.
    rows_each = max(1, 1024 // padded)
    _rms_norm_kernel[(triton.cdiv(num_rows, rows_each),)](
        rows,
        before,
        weight,
        normed,
        normed if total is None else total,
        num_rows,
        rows.shape[1],
        *rows.stride()[:2],
        *before.stride()[:2],
        epsilon,
        HAS_RESIDUAL=residual is not None,
        WIDTH=width,
        WIDTH_PAD=padded,
        ROWS=rows_each,
        num_warps=8 if padded >= 4096 else 4,
    )
    return normed, total


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x_i, x_{i + D/2}) of ``states`` [T, H, D] by the tables [T, D]; contiguous result."""
    states, cos, sin = (_contiguous_last(tensor) for tensor in (states, cos, sin))
    tokens, heads, head_dim = states.shape
    rotated = torch.empty(states.shape, dtype=states.dtype, device=states.device)
    _rotate_kernel[(tokens,)](
        states,
        rotated,
        cos,
        sin,
        *states.stride()[:2],
        cos.stride(0),
        sin.stride(0),
        HEADS=heads,
        HEADS_PAD=triton.next_power_of_2(heads),
        HALF=head_dim // 2,
        HALF_PAD=triton.next_power_of_2(head_dim // 2),
        num_warps=4 if heads * head_dim >= 1024 else 1,
    )
    return rotated


def swiglu(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` of [..., 2 * F], gate first; [..., F], contiguous."""
    width = gate_up.shape[-1] // 2
    rows = _contiguous_last(gate_up.reshape(-1, 2 * width))
    output = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype, device=gate_up.device)
    columns = min(triton.next_power_of_2(width), 1024)
    _swiglu_kernel[(rows.shape[0], triton.cdiv(width, columns))](
        rows, output, rows.stride(0), WIDTH=width, COLUMNS=columns, num_warps=4
    )
    return output


def _as_rows(states: Tensor) -> Tensor:
    """Return [outer, inner, D] with D contiguous: a view of [T, D] or [T, H, D] of any outer strides."""
    states = _contiguous_last(states)
    if states.dim() == 3:
        return states
    return states.reshape(-1, 1, states.shape[-1])


def _contiguous_last(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


MANY_TOKENS = 2048
"""Tokens from which a program handles several: programs are plentiful, and each keeps more loads in flight."""


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
    """Write ``TOKENS`` tokens by ``COLUMNS`` of their ``WIDTH`` (heads * dim) numbers."""
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
    tl.store(keys + cells, k, mask=mask)
    tl.store(values + cells, v, mask=mask)


def write_kv(key: Tensor, value: Tensor, kv_layer: Tensor, slot_mapping: Tensor) -> None:
    """Store K and V [T, Hkv, D], any strides, into ``kv_layer`` [2, num_blocks, block_size, Hkv, D] at slots [T].

    The cache has their dtype, and D is contiguous in it.
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
