"""Attention and the paged cache: the CPU's operators, plain torch's among them, against the oracle."""

from __future__ import annotations

import pytest
import torch
from attention_contract import (
    TOLERANCES,
    Batch,
    Segments,
    batches,
    check_segments,
    check_step,
    segments,
)
from hypothesis import given, settings
from operator_oracle import ReferenceOps

from device.base import AttentionOps, AttnMeta
from device.ops.cpu import CpuOps
from device.ops.plain import PlainOps

CPU = torch.device("cpu")
CASES = settings(max_examples=25, deadline=None)
EVERY_OPS = pytest.mark.parametrize(
    "ops",
    [PlainOps(), CpuOps(), CpuOps(tile_bytes=4096, query_rows=3)],
    ids=["plain", "cpu", "cpu in small tiles"],
)


@EVERY_OPS
@given(batch=batches())
@CASES
def test_steps_equal_the_oracle(ops: AttentionOps, batch: Batch) -> None:
    check_step(ops, batch, torch.float32, CPU, TOLERANCES[torch.float32])


@EVERY_OPS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@given(batch=batches())
@settings(CASES, max_examples=10)
def test_steps_in_half_precision_stay_near_the_oracle(ops: AttentionOps, dtype: torch.dtype, batch: Batch) -> None:
    check_step(ops, batch, dtype, CPU, TOLERANCES[dtype])


@EVERY_OPS
@given(case=segments())
@CASES
def test_encode_equals_the_oracle(ops: AttentionOps, case: Segments) -> None:
    check_segments(ops, case, torch.float32, CPU, TOLERANCES[torch.float32])


@EVERY_OPS
@pytest.mark.parametrize("head_dim", [72, 80, 96])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_encode_in_half_precision_stays_near_the_oracle(
    ops: AttentionOps, dtype: torch.dtype, head_dim: int
) -> None:
    case = Segments(lengths=[16, 16, 0, 5, 16, 1], heads=2, head_dim=head_dim, layout="fused", seed=0)
    check_segments(ops, case, dtype, CPU, TOLERANCES[dtype])


@EVERY_OPS
def test_chunks_of_one_prompt_give_what_the_whole_gives(ops: AttentionOps) -> None:
    """Cutting a prompt at every border changes no token's output."""
    length, block_size = 13, 4
    whole = Batch([], [(length, length)], block_size=block_size, kv_heads=2, group=2, head_dim=8, seed=3)
    expected, cache = whole.run(ops)
    for border in range(1, length):
        for tokens in (slice(0, border), slice(border, length)):
            meta = AttnMeta(
                block_size=block_size,
                slot_mapping=whole.meta.slot_mapping[tokens],
                num_decodes=0,
                decode_block_table=torch.zeros(0, 1, dtype=torch.int32),
                decode_context_lens=torch.zeros(0, dtype=torch.int64),
                decode_context_lens_host=[],
                prefill_query_lens=[tokens.stop - tokens.start],
                prefill_context_lens=[tokens.stop],
                prefill_block_table=whole.meta.prefill_block_table,
            )
            plan = ops.prepare(meta, torch.float32)
            output = ops.attend(
                whole.query[tokens], whole.key[tokens], whole.value[tokens], cache, plan, whole.scale
            )
            torch.testing.assert_close(output, expected[tokens], rtol=1e-5, atol=1e-5)


def test_a_plan_of_other_operators_is_refused() -> None:
    batch = Batch([3], [], block_size=4, kv_heads=1, group=1, head_dim=4, seed=0)
    plan = ReferenceOps().prepare(batch.meta, torch.float32)
    with pytest.raises(AssertionError, match="prepared"):
        CpuOps().attend(batch.query, batch.key, batch.value, batch.kv_layer, plan, 1.0)


class _SeesTheFuture(PlainOps):
    """Chunks without causality."""

    def prepare(self, meta: AttnMeta, dtype: torch.dtype):  # type: ignore[no-untyped-def]
        plan = super().prepare(meta, dtype)
        for chunk in plan.chunks:
            if chunk.mask is not None:
                chunk.mask.zero_()
        return plan


def test_the_contract_catches_a_wrong_backend() -> None:
    batch = Batch([5, 20], [(6, 11), (4, 4)], block_size=4, kv_heads=2, group=3, head_dim=16, seed=1)
    check_step(PlainOps(), batch, torch.bfloat16, CPU, TOLERANCES[torch.bfloat16])
    with pytest.raises(AssertionError):
        check_step(_SeesTheFuture(), batch, torch.bfloat16, CPU, TOLERANCES[torch.bfloat16])
