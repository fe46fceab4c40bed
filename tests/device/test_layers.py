"""Norms, rotary positions, SwiGLU and argmax: the CPU's operators, the oracle and transformers' own."""

from __future__ import annotations

import pytest
import torch
from attention_contract import TOLERANCES, Layers, check_layers, layers
from hypothesis import example, given, settings
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

EVERY_OPS = pytest.mark.parametrize("ops", [ReferenceOps(), PlainOps(), CpuOps()], ids=lambda ops: ops.name)
CPU = torch.device("cpu")
CASES = settings(max_examples=25, deadline=None)
HEAD_DIM = 32


def multimodal_positions() -> Tensor:
    """[3, T]: five text tokens, an image of 4 x 6 patches, three text tokens far on."""
    image = torch.stack(torch.meshgrid(torch.arange(1), torch.arange(4), torch.arange(6), indexing="ij"))
    text = torch.arange(5).expand(3, -1)
    return torch.cat((text, image.flatten(1) + 5, torch.arange(3).expand(3, -1) + 30_000), dim=1)


def transformers_tables(embedding: type[nn.Module], config: object, positions: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = embedding(config)(torch.zeros(1), positions[:, None])
    return cos[0], sin[0]


@st.composite
def multimodal_cases(draw: st.DrawFn) -> tuple[int, list[int], Tensor]:
    """A head dimension, its three sections, and positions [3, T] of any tokens."""
    half = draw(st.sampled_from([8, 16, 40, 64]))
    time, height = sorted(draw(st.lists(st.integers(1, half - 1), min_size=2, max_size=2, unique=True)))
    tokens = draw(st.lists(st.tuples(*[st.integers(0, 200_000)] * 3), min_size=1, max_size=8))
    return 2 * half, [time, height - time, half - height], torch.tensor(tokens).T


def frequencies(head_dim: int) -> Tensor:
    return 1.0 / 10_000.0 ** (torch.arange(0, head_dim, 2).float() / head_dim)


@given(case=multimodal_cases())
@example(case=(HEAD_DIM, [8, 4, 4], multimodal_positions()))
@example(case=(128, [16, 24, 24], multimodal_positions()))
@CASES
def test_multimodal_tables_equal_those_of_qwen2_5_vl(case: tuple[int, list[int], Tensor]) -> None:
    head_dim, sections, positions = case
    config = Qwen2_5_VLTextConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": sections},
    )
    expected = transformers_tables(Qwen2_5_VLRotaryEmbedding, config, positions)
    tables = rotary_tables(positions, frequencies(head_dim), position_axes(sections))
    torch.testing.assert_close(tables, expected, rtol=0, atol=0)


@given(case=multimodal_cases())
@example(case=(HEAD_DIM, [6, 5, 5], multimodal_positions()))
@example(case=(128, [24, 20, 20], multimodal_positions()))
@CASES
def test_interleaved_tables_equal_those_of_qwen3_vl(case: tuple[int, list[int], Tensor]) -> None:
    head_dim, sections, positions = case
    config = Qwen3VLTextConfig(
        head_dim=head_dim,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": sections},
    )
    expected = transformers_tables(Qwen3VLTextRotaryEmbedding, config, positions)
    tables = rotary_tables(positions, frequencies(head_dim), position_axes(sections, interleaved=True))
    torch.testing.assert_close(tables, expected, rtol=0, atol=0)


@EVERY_OPS
def test_rotation_equals_that_of_transformers(ops: AttentionOps) -> None:
    positions = torch.tensor([0, 1, 2, 77, 4000])
    query, key = torch.randn(5, 4, HEAD_DIM), torch.randn(5, 2, HEAD_DIM)
    cos, sin = rotary_tables(positions[None], frequencies(HEAD_DIM))
    expected = apply_rotary_pos_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos[None], sin[None])
    rotated = ops.rotary(query, key, cos, sin)
    for ours, theirs in zip(rotated, expected, strict=True):
        torch.testing.assert_close(ours, theirs[0].transpose(0, 1), rtol=1e-6, atol=1e-6)


@EVERY_OPS
def test_norms_equal_those_of_transformers(ops: AttentionOps) -> None:
    norm = Qwen2RMSNorm(24, eps=1e-5)
    nn.init.normal_(norm.weight)
    hidden, residual = torch.randn(2, 7, 24).unbind(0)
    with torch.no_grad():
        torch.testing.assert_close(ops.rms_norm(hidden, norm.weight, 1e-5), norm(hidden), rtol=1e-5, atol=1e-6)
        normed, total = ops.add_rms_norm(hidden, residual, norm.weight, 1e-5)
        torch.testing.assert_close(total, hidden + residual, rtol=0, atol=0)
        torch.testing.assert_close(normed, norm(hidden + residual), rtol=1e-5, atol=1e-6)


@EVERY_OPS
@given(case=layers())
@CASES
def test_layers_equal_the_oracle(ops: AttentionOps, case: Layers) -> None:
    check_layers(ops, case, torch.float32, CPU, TOLERANCES[torch.float32])


@EVERY_OPS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@given(case=layers())
@settings(CASES, max_examples=10)
def test_layers_in_half_precision_stay_near_the_oracle(
    ops: AttentionOps, dtype: torch.dtype, case: Layers
) -> None:
    check_layers(ops, case, dtype, CPU, TOLERANCES[dtype])


@EVERY_OPS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_argmax_takes_the_first_among_equals(ops: AttentionOps, dtype: torch.dtype) -> None:
    """Whatever vector width the reduction has, and wherever the largest lie."""
    logits = torch.randn(4, 1000, dtype=dtype).clamp_(max=2.0)
    for row, first in enumerate((0, 17, 500, 998)):
        logits[row, first:] = logits[row, first:].masked_fill(torch.arange(first, 1000) % 2 == first % 2, 3.0)
    indices = ops.argmax(logits)
    assert indices.dtype == torch.int64
    assert indices.tolist() == [0, 17, 500, 998]
