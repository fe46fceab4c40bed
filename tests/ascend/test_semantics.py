"""The backend on CPU tensors, with our own kernels under the wheel's schemas, against the reference operators."""

from __future__ import annotations

import pytest
from ascend_ladder import require_torch_npu
from attention_contract import (
    TOLERANCES,
    Batch,
    Layers,
    Segments,
    batches,
    check_layers,
    check_segments,
    check_step,
    layers,
    segments,
)
from hypothesis import given, settings

require_torch_npu()

import ascend_kernels  # noqa: E402
import torch  # noqa: E402

from device.ops.ascend import AscendOps  # noqa: E402

ascend_kernels.register()

CPU = torch.device("cpu")
BACKENDS = {"TND": AscendOps(), "BSND": AscendOps(layout="BSND")}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The reference goes token by token: contexts stay short, but pass the border of a block.
CHUNKS = batches(block_sizes=[128], head_dims=[8, 128], groups=[1, 2, 7], kv_heads=[1, 2], max_context=140)
DECODES = batches(block_sizes=[16, 48, 128], head_dims=[64, 128], max_prefills=0)


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=40, deadline=None)
@given(batch=CHUNKS)
def test_steps_with_chunks(name: str, batch: Batch) -> None:
    check_step(BACKENDS[name], batch, torch.float32, CPU, TOLERANCES[torch.float32])


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=25, deadline=None)
@given(batch=DECODES)
def test_decode_steps(name: str, batch: Batch) -> None:
    check_step(BACKENDS[name], batch, torch.float32, CPU, TOLERANCES[torch.float32])


@pytest.mark.parametrize("dtype", DTYPES[1:])
@settings(max_examples=25, deadline=None)
@given(batch=CHUNKS)
def test_half_types(dtype: torch.dtype, batch: Batch) -> None:
    check_step(BACKENDS["TND"], batch, dtype, CPU, TOLERANCES[dtype])


@settings(max_examples=25, deadline=None)
@given(case=segments(head_dims=[64, 72, 80, 96, 128, 160]))
def test_vision_attention(case: Segments) -> None:
    check_segments(BACKENDS["TND"], case, torch.float32, CPU, TOLERANCES[torch.float32])


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=25, deadline=None)
@given(case=layers())
def test_layer_operators(dtype: torch.dtype, case: Layers) -> None:
    check_layers(BACKENDS["TND"], case, dtype, CPU, TOLERANCES[dtype])
