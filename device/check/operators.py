"""Comparisons of a backend's operators with the oracle, for the tests and for ``devices --check``.

Each function makes random inputs of the given shapes, rounds them to the dtype, runs the backend on its device and
the oracle in float32 on the CPU, and returns the largest error, as a fraction of 1 + the expected magnitude. It
raises AssertionError, with the error, where that is more than ``tolerance``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from device.base import AttentionOps
from device.check.batch import Batch, Layout, lay_out
from device.ops.reference import ReferenceOps


def check_step(
    ops: AttentionOps, batch: Batch, dtype: torch.dtype, device: torch.device, tolerance: float
) -> float:
    """``prepare``, ``write_kv`` and ``attend`` of one step: the outputs, and the cache bit by bit."""
    expected, expected_cache = batch.rounded(dtype).run(ReferenceOps())
    output, cache = batch.run(ops, dtype, device)
    assert output.is_contiguous(), f"attend returned strides {output.stride()} for shape {tuple(output.shape)}"
    # Padding rows may write the same slot, in any order: nobody reads them, but NaN would spread.
    assert bool(torch.isfinite(cache[:, 0]).all()), "NaN in block 0"
    assert bool(torch.isfinite(output).all()), "NaN or infinity in the output: something not owned was read"
    written = cache[:, 1:].cpu().float()
    assert torch.equal(written.nan_to_num(7.0), expected_cache[:, 1:].nan_to_num(7.0)), "write_kv stored otherwise"
    pads = slice(batch.num_decodes, batch.num_decodes + batch.padding)
    keep = torch.ones(len(expected), dtype=torch.bool)
    keep[pads] = False
    return compare(output.cpu()[keep], expected[keep], dtype, tolerance)


def check_encode(
    ops: AttentionOps,
    lengths: Sequence[int],
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    tolerance: float,
    *,
    seed: int = 0,
    layout: Layout = "fused",
) -> float:
    """Attention of a tower over segments of these lengths, by borders on either side; 0 is an empty segment."""
    borders = list(accumulate(lengths, initial=0))
    states = list(_random((3, borders[-1], heads, head_dim), dtype, seed))
    scale = head_dim**-0.5
    exact = [state.float() for state in states]
    expected = ReferenceOps().encode(exact[0], exact[1], exact[2], borders, scale)
    query, key, value = lay_out([state.to(device) for state in states], layout)
    output = ops.encode(query, key, value, borders, scale)
    assert output.is_contiguous(), f"encode returned strides {output.stride()} for shape {tuple(output.shape)}"
    difference = compare(output, expected, dtype, tolerance)
    if (encode := ops.encode_captured(dtype)) is not None and borders[-1]:
        there = torch.tensor([*borders, borders[-1]], dtype=torch.int32).to(device)
        query, key, value = (F.pad(state, (0, 0, 0, 0, 0, 3), value=1e3) for state in (query, key, value))
        output = encode(query, key, value, there, max(lengths), scale)
        difference = max(difference, compare(output[: borders[-1]], expected, dtype, tolerance))
    return difference


def check_norms(
    ops: AttentionOps,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    tolerance: float,
    *,
    seed: int = 0,
    layout: Layout = "contiguous",
    epsilon: float = 1e-6,
) -> float:
    """``rms_norm`` and ``add_rms_norm`` of [T, D], or of heads [T, H, D] with one weight [D] for all."""
    hidden, residual = (tensor for tensor in _random((2, *shape), dtype, seed))
    weight = _random((shape[-1],), dtype, seed + 1)
    oracle = ReferenceOps()
    given, before = lay_out([hidden.to(device), residual.to(device)], layout)
    normed = ops.rms_norm(given, weight.to(device), epsilon)
    error = compare(normed, oracle.rms_norm(hidden.float(), weight.float(), epsilon), dtype, tolerance)
    normed, total = ops.add_rms_norm(given, before, weight.to(device), epsilon)
    exact = (hidden + residual).float()
    compare(total, exact, dtype, 0.0)
    return max(error, compare(normed, oracle.rms_norm(exact, weight.float(), epsilon), dtype, tolerance))


def check_rotary(
    ops: AttentionOps,
    tokens: int,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    tolerance: float,
    *,
    seed: int = 0,
    layout: Layout = "fused",
) -> float:
    """Rotation of queries and keys with float32 tables, whatever the dtype of the states."""
    states = [_random((tokens, heads, head_dim), dtype, seed + heads) for heads in (query_heads, kv_heads)]
    angles = _random((tokens, head_dim // 2), torch.float32, seed + 2).repeat(1, 2) * 10
    cos, sin = angles.cos(), angles.sin()
    expected = ReferenceOps().rotary(states[0].float(), states[1].float(), cos, sin)
    query, key = lay_out([state.to(device) for state in states], layout)
    rotated = ops.rotary(query, key, cos.to(device), sin.to(device))
    return max(compare(ours, theirs, dtype, tolerance) for ours, theirs in zip(rotated, expected, strict=True))


def check_swiglu(
    ops: AttentionOps,
    tokens: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    tolerance: float,
    *,
    seed: int = 0,
    layout: Layout = "contiguous",
) -> float:
    """``silu(gate) * up`` of a fused projection [tokens, 2 * width]."""
    gate_up = _random((tokens, 2 * width), dtype, seed) * 3
    [given] = lay_out([gate_up.to(device)], layout)
    return compare(ops.swiglu(given), ReferenceOps().swiglu(gate_up.float()), dtype, tolerance)


def check_argmax(
    ops: AttentionOps, rows: int, vocabulary: int, dtype: torch.dtype, device: torch.device, *, seed: int = 0
) -> float:
    """The first of the largest entries, among ties and masked entries; the error is 0."""
    generator = torch.Generator().manual_seed(seed)
    # Few distinct numbers, so that the largest comes often; a masked entry is minus infinity.
    logits = torch.randint(-3, 3, (rows, vocabulary), generator=generator).to(dtype)
    logits[:, torch.rand(vocabulary, generator=generator) < 0.3] = float("-inf")
    if rows:
        logits[0] = float("-inf")
    is_largest = logits == logits.amax(dim=-1, keepdim=True)
    places = torch.arange(vocabulary).expand(rows, -1).masked_fill(~is_largest, vocabulary)
    indices = ops.argmax(logits.to(device))
    assert indices.dtype == torch.int64, f"argmax returned {indices.dtype}, not int64"
    expected = places.amin(dim=-1)
    assert torch.equal(indices.cpu(), expected), f"argmax gave {indices.tolist()}, not {expected.tolist()}"
    return 0.0


def compare(actual: Tensor, expected: Tensor, dtype: torch.dtype, tolerance: float) -> float:
    """The largest error of ``actual``, which must be of ``dtype``, against float32 numbers."""
    assert actual.dtype == dtype, f"the result is {actual.dtype}, not {dtype}"
    assert actual.shape == expected.shape, f"the result is {tuple(actual.shape)}, not {tuple(expected.shape)}"
    if not actual.numel():
        return 0.0
    errors = (actual.detach().cpu().float() - expected).abs() / (1 + expected.abs())
    wrong = ~(errors <= tolerance)  # NaN is wrong, too
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} numbers differ from the oracle's, by up to "
        f"{float(errors.nan_to_num(float('inf')).max()):.2g} where {tolerance:.2g} is right"
    )
    return float(errors.max())


def _random(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
