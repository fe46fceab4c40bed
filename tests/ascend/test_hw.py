"""Tests for an NPU alone. Elsewhere these are listed as not run."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
from collections.abc import Iterator
from typing import cast

import pytest
import torch
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

from device.ascend import AscendDevice
from device.check import check_device
from device.ops.ascend import AscendOps, Layout
from device.registry import get_device


def has_npu() -> bool:
    if "EPD_ASCEND_STUBS" in os.environ or importlib.util.find_spec("torch_npu") is None:
        return False
    importlib.import_module("torch_npu")
    return bool(torch.get_device_module("npu").device_count())


pytestmark = [pytest.mark.skipif(not has_npu(), reason="not run: no NPU")]

DTYPE, TOLERANCE = torch.bfloat16, TOLERANCES[torch.bfloat16]
LAYOUTS = ("TND", "BSND")


@pytest.fixture(scope="module")
def npu() -> Iterator[AscendDevice]:
    device = cast(AscendDevice, get_device("npu:0"))
    device.activate()
    yield device


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps(layout: Layout, npu: AscendDevice) -> None:
    """Settles whether TND may have pages on this hardware."""

    @settings(max_examples=30, deadline=None)
    @given(batch=batches(block_sizes=[128], head_dims=[64, 128], groups=[1, 2, 4, 7, 8], max_context=300))
    def check(batch: Batch) -> None:
        check_step(AscendOps(layout=layout), batch, DTYPE, npu.torch_device, TOLERANCE)

    check()


def test_vision_attention(npu: AscendDevice) -> None:
    @settings(max_examples=30, deadline=None)
    @given(case=segments(head_dims=[64, 72, 80, 96, 128]))
    def check(case: Segments) -> None:
        check_segments(npu.ops, case, DTYPE, npu.torch_device, TOLERANCE)

    check()


def test_layer_operators(npu: AscendDevice) -> None:
    @settings(max_examples=30, deadline=None)
    @given(case=layers(head_dims=[64, 128], widths=[64, 128, 1024]))
    def check(case: Layers) -> None:
        check_layers(npu.ops, case, DTYPE, npu.torch_device, TOLERANCE)

    check()


def test_the_self_test_passes(npu: AscendDevice) -> None:
    """Streams and captured decode steps among it, each replay with its lengths."""
    assert [result for result in check_device(npu) if not result.passed] == []


def test_a_share_of_memory_and_cores() -> None:
    """In a process of its own: torch_npu sets the cores once in a process."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        mechanisms, is_capped = pool.apply(_take_half)
    assert [mechanism.split()[-2:] for mechanism in mechanisms[1:]] == [["cube", "cores"], ["vector", "cores"]]
    assert is_capped


def _take_half() -> tuple[tuple[str, ...], bool]:
    device = get_device("npu:0")
    device.activate()
    partition = device.apply_share(0.5)
    total, _ = device.memory()
    try:
        torch.empty(int(total * 0.6), dtype=torch.uint8, device=device.torch_device)
    except RuntimeError:
        return partition.mechanisms, True
    return partition.mechanisms, False
