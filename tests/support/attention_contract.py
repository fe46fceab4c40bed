"""The contract of ``device.base.AttentionOps``: hypothesis draws cases for ``operator_comparison``.

A backend's test file draws with the limits of its hardware and calls the checks::

    @given(batch=batches(block_sizes=[16, 128], head_dims=[64, 128]))
    def test_steps(batch): check_step(ops, batch, torch.float16, device, 1e-2)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from operator_batch import LAYOUTS, Batch, Layout
from operator_comparison import Comparison
from torch import Tensor

from device.base import AttentionOps

__all__ = [
    "LAYOUTS",
    "TOLERANCES",
    "Batch",
    "Comparison",
    "Layers",
    "Layout",
    "Segments",
    "batches",
    "check_layers",
    "check_segments",
    "check_step",
    "dense_attention",
    "layers",
    "segments",
]

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


def check_step(
    ops: AttentionOps, batch: Batch, dtype: torch.dtype, device: torch.device, tolerance: float
) -> None:
    Comparison(ops=ops, dtype=dtype, device=device, tolerance=tolerance).step(batch)


def check_segments(
    ops: AttentionOps, case: Segments, dtype: torch.dtype, device: torch.device, tolerance: float
) -> None:
    one = Comparison(ops=ops, dtype=dtype, device=device, tolerance=tolerance, seed=case.seed, layout=case.layout)
    one.encode(case.lengths, case.heads, case.head_dim)


def check_layers(
    ops: AttentionOps, case: Layers, dtype: torch.dtype, device: torch.device, tolerance: float
) -> None:
    """Norms of rows and of heads, rotation, SwiGLU and argmax of one drawn shape."""
    tokens = case.tokens
    one = Comparison(ops=ops, dtype=dtype, device=device, tolerance=tolerance, seed=case.seed, layout=case.layout)
    for shape in ((tokens, case.width), (tokens, case.query_heads, case.head_dim)):
        one.norms(shape)
    one.rotary(tokens, case.query_heads, case.kv_heads, case.head_dim)
    one.swiglu(tokens, case.width)
    one.argmax(tokens, case.width)


def dense_attention(batch: Batch) -> Tensor:
    """The oracle's result: torch's own attention over unpaged K/V, with an explicit mask."""
    outputs: list[Tensor] = [batch.query[:0]]
    start = 0
    for (query_len, context), (keys, values) in zip(batch.sequences, batch.dense, strict=True):
        output = F.scaled_dot_product_attention(
            batch.query[start : start + query_len].transpose(0, 1),
            keys.transpose(0, 1),
            values.transpose(0, 1),
            attn_mask=torch.ones(query_len, context, dtype=torch.bool).tril(context - query_len),
            scale=batch.scale,
            enable_gqa=True,
        )
        outputs.append(output.transpose(0, 1))
        start += query_len
    return torch.cat(outputs)
