"""The backend's calls one by one on fake tensors of npu:0."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from ascend_ladder import require_torch_npu
from ascend_recorder import NpuRecorder

require_torch_npu()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from device.base import AttnMeta  # noqa: E402
from device.ops.ascend import AscendOps, Layout  # noqa: E402

ATTENTION = "npu_fused_infer_attention_score_v2"
BLOCK_SIZE, NUM_BLOCKS, HEADS, KV_HEADS, HEAD_DIM = 128, 64, 32, 8, 128


@pytest.fixture(autouse=True)
def fake() -> Iterator[None]:
    with FakeTensorMode():
        yield


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="npu:0")


def meta_of(
    decodes: list[int], chunks: list[tuple[int, int]], block_size: int = BLOCK_SIZE, **changes: Any
) -> AttnMeta:
    """Context lengths of decodes; (query, context) lengths of chunks."""
    tables = [
        empty(len(lens), max((-(-n // block_size) for n in lens), default=0), dtype=torch.int32)
        for lens in (decodes, [context for _, context in chunks])
    ]
    fields: dict[str, Any] = {
        "block_size": block_size,
        "slot_mapping": empty(len(decodes) + sum(query for query, _ in chunks), dtype=torch.int64),
        "num_decodes": len(decodes),
        "decode_block_table": tables[0],
        "decode_context_lens": empty(len(decodes), dtype=torch.int64),
        "decode_context_lens_host": decodes,
        "prefill_query_lens": [query for query, _ in chunks],
        "prefill_context_lens": [context for _, context in chunks],
        "prefill_block_table": tables[1],
    }
    return AttnMeta(**fields | changes)


def attend(
    ops: AscendOps, meta: AttnMeta, heads: int = HEADS, kv_heads: int = KV_HEADS, head_dim: int = HEAD_DIM
) -> list[str]:
    """The operators that one layer's cache write and attention call."""
    tokens = len(meta.slot_mapping)
    states = empty(tokens, heads + 2 * kv_heads, head_dim)
    query, key, value = states.split((heads, kv_heads, kv_heads), dim=1)
    kv_layer = empty(2, NUM_BLOCKS, meta.block_size, kv_heads, head_dim)
    with NpuRecorder() as recorder:
        plan = ops.prepare(meta, torch.bfloat16)
        ops.write_kv(key, value, kv_layer, meta.slot_mapping)
        output = ops.attend(query, key, value, kv_layer, plan, HEAD_DIM**-0.5)
    assert output.shape == query.shape and output.is_contiguous() and output.device.type == "npu"
    return recorder.calls


STEPS = {
    "prefill": ([], [(300, 300)]),
    "chunk": ([], [(300, 1000), (1, 129), (128, 128)]),
    "decode": ([1, 128, 129, 2000], []),
    "one decode": ([1], []),
    "mixed": ([5, 700], [(17, 17), (200, 456)]),
}


@pytest.mark.parametrize("layout", ["TND", "BSND"])
@pytest.mark.parametrize("step", STEPS)
def test_a_step_passes(step: str, layout: Layout) -> None:
    decodes, chunks = STEPS[step]
    calls = attend(AscendOps(layout=layout), meta_of(decodes, chunks))
    chunk_calls = min(len(chunks), 1) if layout == "TND" else len(chunks)
    assert calls == ["npu_scatter_pa_kv_cache", *[ATTENTION] * (chunk_calls + bool(decodes))]


@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_heads_that_tnd_does_not_take_go_by_bsnd(head_dim: int) -> None:
    calls = attend(AscendOps(), meta_of([40], [(30, 50), (7, 7)]), heads=8, head_dim=head_dim)
    assert calls == ["npu_scatter_pa_kv_cache", *[ATTENTION] * 3], "a call for the decode and one for each chunk"


@pytest.mark.parametrize("head_dim", [72, 1024])
def test_heads_that_no_layout_takes_are_refused(head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"heads of {head_dim} dimensions.*multiples of 16 up to 512"):
        attend(AscendOps(), meta_of([40], []), heads=8, head_dim=head_dim)


@pytest.mark.parametrize("block_size", [0, 8, 100, 520, 1024])
@pytest.mark.parametrize("chunks", [[], [(4, 4)]])
def test_block_sizes_that_no_kernel_takes_are_refused(block_size: int, chunks: list[tuple[int, int]]) -> None:
    meta = meta_of([3], chunks)
    changed = {name: getattr(meta, name) for name in AttnMeta.__dataclass_fields__} | {"block_size": block_size}
    with pytest.raises(ValueError, match=f"KV blocks of {block_size} tokens.*128 suits both"):
        AscendOps().prepare(AttnMeta(**changed), torch.bfloat16)


@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 128, 160])
def test_vision_heads_are_padded(head_dim: int) -> None:
    states = [empty(900, 16, head_dim) for _ in range(3)]
    with NpuRecorder() as recorder:
        output = AscendOps().encode(*states, [0, 400, 900], head_dim**-0.5)
    assert output.shape == states[0].shape and output.is_contiguous()
    assert recorder.calls == [ATTENTION]


def test_layer_operators_pass() -> None:
    ops = AscendOps()
    hidden, gate_up = empty(9, 4096), empty(9, 2 * 12288)
    query, key = empty(9, HEADS + KV_HEADS, HEAD_DIM).split((HEADS, KV_HEADS), dim=1)
    tables = [empty(9, HEAD_DIM, dtype=torch.float32) for _ in range(2)]
    with NpuRecorder() as recorder:
        assert ops.rms_norm(hidden, empty(4096), 1e-6).shape == (9, 4096)
        assert ops.rms_norm(query, empty(HEAD_DIM), 1e-6).shape == query.shape
        assert [t.shape for t in ops.add_rms_norm(hidden, hidden, empty(4096), 1e-6)] == [(9, 4096)] * 2
        assert [t.shape for t in ops.rotary(query, key, *tables)] == [query.shape, key.shape]
        assert ops.swiglu(gate_up).shape == (9, 12288)
        assert ops.argmax(hidden).dtype == torch.int64
    assert len(recorder.calls) == 6
