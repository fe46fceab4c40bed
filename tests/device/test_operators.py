"""The CPU's operators, plain torch's among them, against the oracle; the oracle against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_contract import TOLERANCES, batches, check, layers, segments
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_oracle import ReferenceOps
from torch import Tensor, nn
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm, apply_rotary_pos_emb
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from device.base import AttentionOps
from device.ops.cpu import CpuOps
from device.ops.plain import PlainOps, position_axes, rotary_tables

CPU = torch.device("cpu")
EVERY_OPS = pytest.mark.parametrize(
    "ops",
    [PlainOps(), CpuOps(), CpuOps(tile_bytes=4096, query_rows=3)],
    ids=["plain", "cpu", "cpu in small tiles"],
)
EVERY_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@EVERY_OPS
@EVERY_DTYPE
@given(case=batches() | segments() | layers())
@settings(max_examples=60, deadline=None)
def test_operators_equal_the_oracle(ops: AttentionOps, dtype: torch.dtype, case: Any) -> None:
    check(ops, case, dtype, CPU, TOLERANCES[dtype])


@st.composite
def multimodal_cases(draw: st.DrawFn) -> tuple[int, list[int], Tensor]:
    """A head dimension, its three sections, and positions [3, T] of any tokens."""
    half = draw(st.sampled_from([8, 16, 40, 64]))
    time, height = sorted(draw(st.lists(st.integers(1, half - 1), min_size=2, max_size=2, unique=True)))
    tokens = draw(st.lists(st.tuples(*[st.integers(0, 200_000)] * 3), min_size=1, max_size=8))
    return 2 * half, [time, height - time, half - height], torch.tensor(tokens).T


def frequencies(head_dim: int) -> Tensor:
    return 1.0 / 10_000.0 ** (torch.arange(0, head_dim, 2).float() / head_dim)


@pytest.mark.parametrize("is_interleaved", [False, True], ids=["qwen2_5_vl", "qwen3_vl"])
@given(case=multimodal_cases())
@settings(max_examples=25, deadline=None)
def test_multimodal_tables_equal_those_of_transformers(
    is_interleaved: bool, case: tuple[int, list[int], Tensor]
) -> None:
    head_dim, sections, positions = case
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": sections}
    embedding: nn.Module = (
        Qwen3VLTextRotaryEmbedding(Qwen3VLTextConfig(head_dim=head_dim, rope_parameters=rope))
        if is_interleaved
        else Qwen2_5_VLRotaryEmbedding(
            Qwen2_5_VLTextConfig(hidden_size=2 * head_dim, num_attention_heads=2, rope_parameters=rope)
        )
    )
    cos, sin = embedding(torch.zeros(1), positions[:, None])
    axes = position_axes(sections, interleaved=is_interleaved)
    tables = rotary_tables(positions, frequencies(head_dim), axes)
    torch.testing.assert_close(tables, (cos[0], sin[0]), rtol=0, atol=0)


def test_the_oracle_rotates_and_norms_as_transformers() -> None:
    ops, head_dim = ReferenceOps(), 32
    query, key = torch.randn(5, 4, head_dim), torch.randn(5, 2, head_dim)
    cos, sin = rotary_tables(torch.tensor([[0, 1, 2, 77, 4000]]), frequencies(head_dim))
    expected = apply_rotary_pos_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos[None], sin[None])
    for ours, theirs in zip(ops.rotary(query, key, cos, sin), expected, strict=True):
        torch.testing.assert_close(ours, theirs[0].transpose(0, 1), rtol=1e-6, atol=1e-6)
    norm = Qwen2RMSNorm(24, eps=1e-5)
    nn.init.normal_(norm.weight)
    hidden = torch.randn(7, 24)
    with torch.no_grad():
        torch.testing.assert_close(ops.rms_norm(hidden, norm.weight, 1e-5), norm(hidden), rtol=1e-5, atol=1e-6)
