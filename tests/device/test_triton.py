"""The GPU's operators against the oracle: on a GPU where there is one, else in Triton's interpreter on the CPU.

The interpreter runs each program in numpy: float32 and float16 (its bfloat16 products are wrong), small shapes.
Flash attention has no CPU kernel; there a plain implementation of the same contract stands for it.
"""

from __future__ import annotations

import os
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_contract import TOLERANCES, Batch, batches, check, layers, segments
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
triton = pytest.importorskip("triton", reason="not run: Triton is not installed")
# Triton reads the variable when it is imported, and transformers imports it: tests/conftest.py sets it first.
assert HAS_GPU or not isinstance(triton.language.cdiv, triton.JITFunction), "set TRITON_INTERPRET=1 before pytest"

from operator_oracle import ReferenceOps  # noqa: E402

from device.ops import cuda as cuda_ops  # noqa: E402
from device.ops import triton_decode  # noqa: E402
from device.ops.cuda import CudaOps  # noqa: E402
from device.ops.triton_ops import TritonOps  # noqa: E402
from device.ops.varlen import varlen  # noqa: E402

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
DTYPES = [
    torch.float32,
    pytest.param(torch.float16, marks=[] if HAS_GPU else [pytest.mark.slow]),
    *([torch.bfloat16] if HAS_GPU else []),
]
CASES = settings(max_examples=25 if HAS_GPU else 12, deadline=None)
# On a GPU every shape is compiled once, a third of a second each: fewer shapes there, and all lengths.
HEAD_DIMS = (64, 80, 128) if HAS_GPU else (16, 20, 64, 72, 80, 128)
BLOCK_SIZES = (16, 48) if HAS_GPU else (1, 3, 16, 32, 48)
GROUPS = (1, 4, 7) if HAS_GPU else range(1, 9)
LAYERS = layers(head_dims=(64, 80), widths=(64, 300)) if HAS_GPU else layers()


def plain_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    max_query: int,
    max_key: int,
    *,
    scale: float,
    causal: bool,
) -> Tensor:
    """``varlen`` one sequence at a time."""
    assert query.shape[-1] % 8 == 0 and {query_ends.dtype, key_ends.dtype} == {torch.int32}
    outputs: list[Tensor] = []
    for queries, keys in zip(pairwise(query_ends.tolist()), pairwise(key_ends.tolist()), strict=True):
        count, context = queries[1] - queries[0], keys[1] - keys[0]
        assert count <= max_query and context <= max_key
        if not count:  # behind the last segment of a captured batch
            continue
        seen = torch.ones(count, context, dtype=torch.bool).tril(context - count if causal else context)
        states = (query[slice(*queries)], key[slice(*keys)], value[slice(*keys)])
        q, k, v = (state.transpose(0, 1).float() for state in states)
        output = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
        outputs.append(output.transpose(0, 1).to(query.dtype))
    return torch.cat(outputs)


VARLEN = varlen if HAS_GPU else plain_varlen
OPS = [TritonOps(cores=4, varlen=VARLEN), TritonOps(cores=132, varlen=None)]


def tolerance(dtype: torch.dtype) -> float:
    # torch's own float32 prefill on a GPU may go through TF32.
    return 2e-3 if HAS_GPU and dtype == torch.float32 else TOLERANCES[dtype]


@pytest.mark.parametrize("ops", OPS, ids=["varlen", "no varlen"])
@pytest.mark.parametrize("dtype", DTYPES)
@given(
    case=batches(block_sizes=BLOCK_SIZES, head_dims=HEAD_DIMS, groups=GROUPS, kv_heads=(1, 2))
    | segments(head_dims=(10, 64, 72, 80, 96))
    | LAYERS
)
@settings(max_examples=75 if HAS_GPU else 30, deadline=None)
def test_operators_equal_the_oracle(ops: TritonOps, dtype: torch.dtype, case: Any) -> None:
    check(ops, case, dtype, DEVICE, tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=3),
    splits=st.sampled_from([1, 2, 4, 8, 64]),
    tile=st.sampled_from([16, 32, 64]),
    group=st.sampled_from([1, 7, 20]),
    head_dim=st.sampled_from([64, 80]),
    block_size=st.sampled_from([16, 64]),
    seed=st.integers(0, 2**32 - 1),
)
@CASES
def test_decode_is_the_same_however_it_is_split(
    dtype: torch.dtype,
    lengths: list[int],
    splits: int,
    tile: int,
    group: int,
    head_dim: int,
    block_size: int,
    seed: int,
) -> None:
    """Also with far more splits than tiles: the empty ones must count for nothing."""
    batch = Batch(
        lengths, [], block_size=block_size, kv_heads=1, group=group, head_dim=head_dim, seed=seed, padding=1
    ).rounded(dtype)
    expected, cache = batch.run(ReferenceOps())
    meta = batch.meta_on(DEVICE)
    output = triton_decode.paged_decode(
        batch.query.to(DEVICE, dtype),
        cache.to(DEVICE, dtype),
        meta.decode_block_table,
        meta.decode_context_lens,
        batch.scale,
        cores=4,
        config=triton_decode.DecodeConfig(tile=tile, num_warps=4, num_stages=2),
        splits=splits,
    )
    count, allowed = len(lengths), tolerance(dtype)
    torch.testing.assert_close(output[:count].cpu().float(), expected[:count], rtol=allowed, atol=allowed)


@given(
    batch=st.integers(1, 512),
    kv_heads=st.integers(1, 32),
    tokens=st.integers(1, 1 << 20),
    cores=st.integers(1, 200),
)
def test_splits_fill_the_device_and_stay_worth_their_while(
    batch: int, kv_heads: int, tokens: int, cores: int
) -> None:
    splits = triton_decode.count_splits(batch, kv_heads, tokens, cores)
    assert 1 <= splits <= triton_decode.MAX_SPLITS and splits & (splits - 1) == 0
    assert splits == 1 or tokens >= splits * 128
    programs = splits * batch * kv_heads
    assert programs >= 8 * cores or splits == triton_decode.MAX_SPLITS or splits * 2 * 128 > tokens


#: Sequences of halves go to kernels that take nothing else.
HALF = torch.bfloat16 if HAS_GPU else torch.float16


@pytest.mark.parametrize(
    ("lengths", "is_dense"), [([16], True), ([33, 29, 16, 38], True), ([16, 15], False), ([9], False)]
)
def test_long_prompts_go_to_sdpa_in_plans_that_are_built(
    lengths: list[int], is_dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN's plans are of shapes and strides."""
    plans: set[tuple[Any, ...]] = set()
    attend = cuda_ops.attend_dense

    def noted(*states: Any, **options: Any) -> Tensor:
        query, key, value, calls, _ = states
        plans.update((call, state.stride()) for call in calls for state in (query, key, value))
        return attend(*states, **options)

    monkeypatch.setattr(cuda_ops, "DENSE_TOKENS", 16)
    monkeypatch.setattr(cuda_ops, "DENSE_MULTIPLE", 8)
    monkeypatch.setattr(cuda_ops, "attend_dense", noted)
    ops = TritonOps(cores=4, varlen=VARLEN, has_fast_cudnn=True)
    batch = Batch(
        [3], [(n, n) for n in lengths], block_size=16, kv_heads=2, group=3, head_dim=64, seed=1, layout="fused"
    )
    batch.run(ops, HALF, DEVICE)
    assert not plans, "there are none yet"
    ops.build_plans(38, (6, 2), 64, HALF, DEVICE)
    built = plans.copy()
    assert isinstance(ops.prepare(batch.meta_on(DEVICE), HALF).prefills, cuda_ops.DensePrefills) == is_dense
    check(ops, batch, HALF, DEVICE, tolerance(HALF))
    assert plans == built and {call for call, _ in built} == {(1, 16), (1, 24), (1, 32), (1, 40)}


@pytest.mark.parametrize(("lengths", "is_dense"), [([24, 30, 24], True), ([16] * 3, True), ([16, 30], False)])
def test_a_tower_goes_to_sdpa_when_calls_of_its_shape_have_paid_for_a_plan(
    lengths: list[int], is_dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def counted(*states: Any, **options: Any) -> Tensor:
        calls.append(1)
        return VARLEN(*states, **options)

    monkeypatch.setattr(cuda_ops, "LONG_SEGMENT", 24)
    monkeypatch.setattr(cuda_ops, "PLAN_OPERATIONS", 4 * 2 * 30**2 * 64 + 1)
    ops, borders = CudaOps(counted, has_fast_cudnn=True), list(accumulate(lengths, initial=0))
    given = torch.randn(3, borders[-1], 2, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE, HALF)
    outputs = [ops.encode(given[0], given[1], given[2], borders, 0.125) for _ in range(3)]
    assert len(calls) == (1 if is_dense else 3)
    exact = given.cpu().float()
    expected = ReferenceOps().encode(exact[0], exact[1], exact[2], borders, 0.125)
    allowed = tolerance(HALF)
    for output in outputs:
        assert output.is_contiguous()
        torch.testing.assert_close(output.cpu().float(), expected, rtol=allowed, atol=allowed)
