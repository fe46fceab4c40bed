"""The serving operators against the oracle, and the oracle against torch's dense attention."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from device.base import AttentionOps, AttnMeta
from device.ops.cpu import CpuOps
from device.ops.plain import PlainOps
from device.ops.reference import ReferenceOps

TOLERANCE = 1e-5
CASES = settings(max_examples=50, deadline=None)


class Batch:
    """A mixed step with random contents: sequences of (query, context) tokens, decodes first."""

    def __init__(
        self,
        decodes: Sequence[int],
        prefills: Sequence[tuple[int, int]],
        *,
        block_size: int,
        kv_heads: int,
        group: int,
        head_dim: int,
        seed: int,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.sequences = [(1, context) for context in decodes] + list(prefills)
        num_blocks = [-(-context // block_size) for _, context in self.sequences]
        # Blocks of one sequence lie anywhere but in block 0.
        order = (torch.randperm(sum(num_blocks), generator=generator) + 1).tolist()
        self.blocks = [[order.pop() for _ in range(count)] for count in num_blocks]
        total = sum(num_blocks) + 2
        shape = (kv_heads, head_dim)
        # What no sequence owns is poisoned: whoever reads it past the mask gets NaN out.
        self.kv_layer = torch.full((2, total, block_size, *shape), float("nan"))
        self.kv_layer[:, 0] = 9.0
        self.dense: list[Tensor] = []
        slots: list[int] = []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for (query_len, context), blocks in zip(self.sequences, self.blocks, strict=True):
            states = torch.randn(2, context, *shape, generator=generator)
            self.dense.append(states)
            where = [blocks[p // block_size] * block_size + p % block_size for p in range(context)]
            past = context - query_len
            # A block's earlier owner left its numbers behind.
            self.kv_layer[:, blocks] = torch.randn(2, len(blocks), block_size, *shape, generator=generator) * 5
            self.kv_layer.flatten(1, 2)[:, where[:past]] = states[:, :past]
            slots += where[past:]
            keys.append(states[0, past:])
            values.append(states[1, past:])
        self.key, self.value = torch.cat(keys), torch.cat(values)
        self.query = torch.randn(len(slots), kv_heads * group, head_dim, generator=generator)
        self.scale = head_dim**-0.5
        width = max(num_blocks) + 1
        table = torch.tensor([row + [0] * (width - len(row)) for row in self.blocks])
        self.meta = AttnMeta(
            block_size=block_size,
            slot_mapping=torch.tensor(slots),
            num_decodes=len(decodes),
            decode_block_table=table[: len(decodes)],
            decode_context_lens=torch.tensor(list(decodes), dtype=torch.int64),
            decode_context_lens_host=list(decodes),
            prefill_query_lens=[query for query, _ in prefills],
            prefill_context_lens=[context for _, context in prefills],
            prefill_block_table=table[len(decodes) :],
        )

    def run(self, ops: AttentionOps, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """The output, and the cache after it. Inputs have the strides of [1, H, T, D] projections."""
        query, key, value = (
            states.to(dtype).transpose(0, 1).contiguous().transpose(0, 1)
            for states in (self.query, self.key, self.value)
        )
        kv_layer = self.kv_layer.to(dtype)
        plan = ops.prepare(self.meta, dtype)
        ops.write_kv(key, value, kv_layer, self.meta.slot_mapping)
        return ops.attend(query, key, value, kv_layer, plan, self.scale), kv_layer

    def run_dense(self) -> Tensor:
        """torch's SDPA per sequence over unpaged K/V with an explicit mask."""
        outputs: list[Tensor] = []
        start = 0
        for (query_len, context), (keys, values) in zip(self.sequences, self.dense, strict=True):
            mask = torch.ones(query_len, context, dtype=torch.bool).tril(context - query_len)
            output = F.scaled_dot_product_attention(
                self.query[start : start + query_len].transpose(0, 1),
                keys.transpose(0, 1),
                values.transpose(0, 1),
                attn_mask=mask,
                scale=self.scale,
                enable_gqa=True,
            )
            outputs.append(output.transpose(0, 1))
            start += query_len
        return torch.cat(outputs)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    contexts = st.integers(1, 50)
    decodes = draw(st.lists(contexts, max_size=5))
    chunks = contexts.flatmap(lambda context: st.tuples(st.integers(1, context), st.just(context)))
    prefills = draw(st.lists(chunks, min_size=0 if decodes else 1, max_size=3))
    return Batch(
        decodes,
        prefills,
        block_size=draw(st.integers(1, 32)),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.sampled_from([1, 2, 4, 8])),
        head_dim=draw(st.sampled_from([2, 8, 20])),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


@given(batch=batches())
@CASES
def test_serving_operators_equal_the_oracle_and_dense_attention(batch: Batch) -> None:
    expected, expected_cache = batch.run(ReferenceOps())
    torch.testing.assert_close(expected, batch.run_dense(), rtol=TOLERANCE, atol=TOLERANCE)
    for ops in (PlainOps(), CpuOps()):
        output, cache = batch.run(ops)
        assert output.is_contiguous()
        torch.testing.assert_close(output, expected, rtol=TOLERANCE, atol=TOLERANCE)
        assert torch.equal(cache.nan_to_num(7.0), expected_cache.nan_to_num(7.0))


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_the_oracle(dtype: torch.dtype, block_size: int) -> None:
    batch = Batch(
        [1, 17, 40], [(5, 5), (6, 33), (1, 9)], block_size=block_size, kv_heads=2, group=4, head_dim=16, seed=1
    )
    output, _ = batch.run(CpuOps(), dtype)
    assert output.dtype == dtype
    torch.testing.assert_close(output.float(), batch.run_dense(), rtol=3e-2, atol=3e-2)


def test_chunks_of_one_prompt_give_what_the_whole_gives() -> None:
    """Cutting a prompt at every border changes no token's output."""
    length, block_size, ops = 13, 4, CpuOps()
    whole = Batch([], [(length, length)], block_size=block_size, kv_heads=2, group=2, head_dim=8, seed=3)
    expected, cache = whole.run(ops)
    for border in range(1, length):
        for tokens in (slice(0, border), slice(border, length)):
            meta = AttnMeta(
                block_size=block_size,
                slot_mapping=whole.meta.slot_mapping[tokens],
                num_decodes=0,
                decode_block_table=torch.zeros(0, 1, dtype=torch.int64),
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
            torch.testing.assert_close(output, expected[tokens], rtol=TOLERANCE, atol=TOLERANCE)


def test_padding_rows_of_a_decode_batch_disturb_no_sequence() -> None:
    """A graph's unused rows point at block 0 with context 1; the others must not notice, and nothing is NaN."""
    batch = Batch([9, 30], [], block_size=8, kv_heads=1, group=2, head_dim=8, seed=5)
    expected, _ = batch.run(CpuOps())
    meta = batch.meta
    padded = AttnMeta(
        block_size=8,
        slot_mapping=F.pad(meta.slot_mapping, (0, 2)),
        num_decodes=4,
        decode_block_table=F.pad(meta.decode_block_table, (0, 0, 0, 2)),
        decode_context_lens=F.pad(meta.decode_context_lens, (0, 2), value=1),
        decode_context_lens_host=[*meta.decode_context_lens_host, 1, 1],
        prefill_query_lens=[],
        prefill_context_lens=[],
        prefill_block_table=meta.prefill_block_table,
    )
    batch.meta = padded
    batch.query, batch.key, batch.value = (
        F.pad(states, (0, 0, 0, 0, 0, 2), value=1.0) for states in (batch.query, batch.key, batch.value)
    )
    output, _ = batch.run(CpuOps())
    assert torch.isfinite(output).all()
    torch.testing.assert_close(output[:2], expected, rtol=TOLERANCE, atol=TOLERANCE)


@given(
    lengths=st.lists(st.sampled_from([1, 4, 4, 4, 7, 16]), min_size=1, max_size=8),
    heads=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
@CASES
def test_encode_keeps_segments_apart(lengths: list[int], heads: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    borders = [0]
    for length in lengths:
        borders.append(borders[-1] + length)
    query, key, value = torch.randn(3, borders[-1], heads, 10, generator=generator).unbind(0)
    expected = ReferenceOps().encode(query, key, value, borders, 0.3)
    output = CpuOps().encode(query, key, value, borders, 0.3)
    torch.testing.assert_close(output, expected, rtol=TOLERANCE, atol=TOLERANCE)
    segments = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    dense = F.scaled_dot_product_attention(
        query.transpose(0, 1),
        key.transpose(0, 1),
        value.transpose(0, 1),
        attn_mask=segments[:, None] == segments,
        scale=0.3,
    )
    torch.testing.assert_close(output, dense.transpose(0, 1), rtol=TOLERANCE, atol=TOLERANCE)


def test_a_plan_of_other_operators_is_refused() -> None:
    batch = Batch([3], [], block_size=4, kv_heads=1, group=1, head_dim=4, seed=0)
    plan = ReferenceOps().prepare(batch.meta, torch.float32)
    with pytest.raises(AssertionError, match="prepared"):
        CpuOps().attend(batch.query, batch.key, batch.value, batch.kv_layer, plan, 1.0)
