"""The contract of ``device.base.AttentionOps``: hypothesis draws cases, and backends are compared with the oracle.

A backend's test file draws with the limits of its hardware::

    @given(case=batches(block_sizes=[16, 128], head_dims=[64, 128]) | segments() | layers())
    def test_operators(case): check(ops, case, torch.float16, device, 1e-2)

The check makes random inputs, rounds them to the dtype, runs the backend on its device and the oracle in float32
on the CPU. It raises AssertionError where an error, as a fraction of 1 + the expected magnitude, is too large.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from hypothesis import strategies as st
from operator_batch import LAYOUTS, Batch, Layout, lay_out
from operator_oracle import ReferenceOps
from torch import Tensor

from device.base import AttentionOps

TOLERANCES = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""For operators that compute in float32 inside; a GPU's float32 products may need more (TF32)."""
SEEDS = st.integers(0, 2**32 - 1)


@st.composite
def batches(
    draw: st.DrawFn,
    *,
    block_sizes: Sequence[int] = (1, 2, 3, 5, 8, 16, 32),
    head_dims: Sequence[int] = (2, 8, 20, 64),
    groups: Sequence[int] = tuple(range(1, 9)),
    kv_heads: Sequence[int] = (1, 2, 3),
    layouts: Sequence[Layout] = LAYOUTS,
    max_context: int = 50,
    max_decodes: int = 5,
    max_prefills: int = 3,
    max_padding: int = 2,
) -> Batch:
    """Steps of decodes, padding and chunks; any of them may be missing, and all of them.

    Chunks end anywhere: at a block's border, one before, one after; with a past or without.
    """
    block_size = draw(st.sampled_from(block_sizes))
    borders = [n for n in (block_size - 1, block_size, block_size + 1, 2 * block_size) if 1 <= n <= max_context]
    contexts = st.integers(1, max_context) | st.sampled_from([1, *borders])
    chunks = contexts.flatmap(lambda context: st.tuples(st.integers(1, context), st.just(context)))
    return Batch(
        draw(st.lists(contexts, max_size=max_decodes)),
        draw(st.lists(chunks, max_size=max_prefills)),
        block_size=block_size,
        kv_heads=draw(st.sampled_from(kv_heads)),
        group=draw(st.sampled_from(groups)),
        head_dim=draw(st.sampled_from(head_dims)),
        padding=draw(st.integers(0, max_padding)),
        spare_columns=draw(st.integers(1, 3)),
        layout=draw(st.sampled_from(layouts)),
        seed=draw(SEEDS),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """One call of a tower's attention."""

    lengths: list[int]
    heads: int
    head_dim: int
    layout: Layout
    seed: int


@st.composite
def segments(
    draw: st.DrawFn,
    *,
    head_dims: Sequence[int] = (10, 64, 72, 80, 96),
    layouts: Sequence[Layout] = LAYOUTS,
    max_segments: int = 8,
) -> Segments:
    """Windows of one length, images of others, single patches, empty segments, and nothing at all."""
    return Segments(
        lengths=draw(st.lists(st.sampled_from([0, 1, 4, 4, 4, 7, 16]), max_size=max_segments)),
        heads=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from(head_dims)),
        layout=draw(st.sampled_from(layouts)),
        seed=draw(SEEDS),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Layers:
    """Shapes of the operators between the matrix products."""

    tokens: int
    width: int
    query_heads: int
    kv_heads: int
    head_dim: int
    layout: Layout
    seed: int


@st.composite
def layers(
    draw: st.DrawFn,
    *,
    head_dims: Sequence[int] = (2, 8, 64, 80, 128),
    widths: Sequence[int] = (1, 5, 64, 300),
    layouts: Sequence[Layout] = LAYOUTS,
    max_tokens: int = 20,
) -> Layers:
    kv_heads = draw(st.integers(1, 3))
    return Layers(
        tokens=draw(st.integers(0, max_tokens)),
        width=draw(st.sampled_from(widths)),
        query_heads=kv_heads * draw(st.integers(1, 8)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from(head_dims)),
        layout=draw(st.sampled_from(layouts)),
        seed=draw(SEEDS),
    )


def check(
    ops: AttentionOps, case: Batch | Segments | Layers, dtype: torch.dtype, device: torch.device, tolerance: float
) -> None:
    of_case = {Batch: check_step, Segments: check_segments, Layers: check_layers}[type(case)]
    of_case(ops, case, dtype, device, tolerance)  # type: ignore[operator]


def check_step(
    ops: AttentionOps, batch: Batch, dtype: torch.dtype, device: torch.device, tolerance: float
) -> None:
    """``prepare``, ``write_kv`` and ``attend`` of one step: the outputs, and the cache bit by bit."""
    expected, expected_cache = batch.rounded(dtype).run(ReferenceOps())
    output, cache = batch.run(ops, dtype, device)
    assert output.is_contiguous(), f"attend returned strides {output.stride()} for {tuple(output.shape)}"
    # Padding rows may write the same slot, in any order: nobody reads them, but NaN would spread.
    assert bool(torch.isfinite(cache[:, 0]).all()), "NaN in block 0"
    assert bool(torch.isfinite(output).all()), "NaN or infinity in the output: something not owned was read"
    written, expected_cache = cache[:, 1:].cpu().float().nan_to_num(7.0), expected_cache[:, 1:].nan_to_num(7.0)
    assert torch.equal(written, expected_cache), "write_kv stored otherwise"
    keep = torch.ones(len(expected), dtype=torch.bool)
    keep[batch.num_decodes : batch.num_decodes + batch.padding] = False
    compare(output.cpu()[keep], expected[keep], dtype, tolerance)


def check_segments(
    ops: AttentionOps, case: Segments, dtype: torch.dtype, device: torch.device, tolerance: float
) -> None:
    """Attention of a tower over segments, by borders on the host."""
    borders = list(accumulate(case.lengths, initial=0))
    states = list(_random(case.seed, (3, borders[-1], case.heads, case.head_dim), dtype))
    scale = case.head_dim**-0.5
    exact = [state.float() for state in states]
    expected = ReferenceOps().encode(exact[0], exact[1], exact[2], borders, scale)
    query, key, value = lay_out([state.to(device) for state in states], case.layout)
    output = ops.encode(query, key, value, borders, scale)
    assert output.is_contiguous(), f"encode returned strides {output.stride()} for {tuple(output.shape)}"
    compare(output, expected, dtype, tolerance)


def check_layers(
    ops: AttentionOps, case: Layers, dtype: torch.dtype, device: torch.device, tolerance: float
) -> None:
    """Norms of rows and of heads, rotation, SwiGLU and argmax of one drawn shape."""
    oracle, epsilon = ReferenceOps(), 1e-6

    def random(*shape: int, number: int = 0, of: torch.dtype = dtype) -> Tensor:
        return _random(case.seed + number, shape, of)

    def given(*states: Tensor) -> list[Tensor]:
        return lay_out([state.to(device) for state in states], case.layout)

    def check(actual: Tensor, expected: Tensor, allowed: float = tolerance) -> None:
        compare(actual, expected, dtype, allowed)

    for shape in ((case.tokens, case.width), (case.tokens, case.query_heads, case.head_dim)):
        hidden, residual = random(2, *shape)
        weight = random(shape[-1], number=1)
        one, other = given(hidden, residual)
        check(
            ops.rms_norm(one, weight.to(device), epsilon), oracle.rms_norm(hidden.float(), weight.float(), epsilon)
        )
        normed, total = ops.add_rms_norm(one, other, weight.to(device), epsilon)
        exact = (hidden + residual).float()
        check(total, exact, 0.0)
        check(normed, oracle.rms_norm(exact, weight.float(), epsilon))
    query, key = (
        random(case.tokens, heads, case.head_dim, number=heads) for heads in (case.query_heads, case.kv_heads)
    )
    angles = random(case.tokens, case.head_dim // 2, number=2, of=torch.float32).repeat(1, 2) * 10
    cos, sin = angles.cos(), angles.sin()  # float32, whatever the dtype of the states
    rotated = ops.rotary(*given(query, key), cos.to(device), sin.to(device))
    for ours, theirs in zip(rotated, oracle.rotary(query.float(), key.float(), cos, sin), strict=True):
        check(ours, theirs)
    gate_up = random(case.tokens, 2 * case.width) * 3
    check(ops.swiglu(*given(gate_up)), oracle.swiglu(gate_up.float()))
    _check_argmax(ops, case, dtype, device)


def _check_argmax(ops: AttentionOps, case: Layers, dtype: torch.dtype, device: torch.device) -> None:
    """The first of the largest entries, among ties and masked entries."""
    generator = torch.Generator().manual_seed(case.seed)
    # Few distinct numbers, so that the largest comes often; a masked entry is minus infinity.
    logits = torch.randint(-3, 3, (case.tokens, case.width), generator=generator).to(dtype)
    logits[:, torch.rand(case.width, generator=generator) < 0.3] = float("-inf")
    logits[:1] = float("-inf")
    is_largest = logits == logits.amax(dim=-1, keepdim=True)
    expected = torch.arange(case.width).expand(case.tokens, -1).masked_fill(~is_largest, case.width).amin(dim=-1)
    indices = ops.argmax(logits.to(device))
    assert indices.dtype == torch.int64, f"argmax returned {indices.dtype}, not int64"
    assert torch.equal(indices.cpu(), expected), f"argmax gave {indices.tolist()}, not {expected.tolist()}"


def _random(seed: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def compare(actual: Tensor, expected: Tensor, dtype: torch.dtype, tolerance: float) -> None:
    """Check ``actual``, which must be of ``dtype``, against float32 numbers."""
    assert actual.dtype == dtype, f"the result is {actual.dtype}, not {dtype}"
    assert actual.shape == expected.shape, f"the result is {tuple(actual.shape)}, not {tuple(expected.shape)}"
    errors = (actual.detach().cpu().float() - expected).abs() / (1 + expected.abs())
    wrong = ~(errors <= tolerance)  # NaN is wrong, too
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} numbers differ from the oracle's, by up to "
        f"{float(errors.nan_to_num(float('inf')).max()):.2g} where {tolerance:.2g} is right"
    )
