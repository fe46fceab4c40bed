"""The contract over every accelerator of this machine, and over the one of tests."""

from __future__ import annotations

from functools import cache
from typing import Any

import chip.chip  # noqa: F401 - makes its device known
import pytest
import torch
from attention_contract import batches, check, layers, segments
from hypothesis import HealthCheck, given, settings

from device.base import Device
from device.check import TOLERANCES, check_device
from device.registry import get_device, list_devices

NAMES = [report.name for report in list_devices() if report.available and report.kind != "cpu"]
NAMES.append("chip:0")
EACH = pytest.mark.parametrize("name", NAMES)
EACH_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
# Kernels are compiled for some of these shapes: a few constants, many lengths.
CASES = (
    batches(block_sizes=[16, 128], head_dims=[64, 128], kv_heads=[2], groups=[1, 4, 7, 8], max_context=300)
    | segments(head_dims=[64, 72, 80, 96, 128])
    | layers(head_dims=[64, 128], widths=[64, 896, 4864])
)


@cache
def opened(name: str) -> Device:
    device = get_device(name)
    device.activate()
    return device


@EACH
def test_a_device_that_works_is_not_lost(name: str) -> None:
    device = opened(name)
    torch.zeros(4, device=device.torch_device).add_(1)
    device.check()


@EACH
@EACH_DTYPE
@given(case=CASES)
@settings(max_examples=120 if len(NAMES) > 1 else 30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_operators_equal_the_oracle(name: str, dtype: torch.dtype, case: Any) -> None:
    device = opened(name)
    if dtype not in device.dtypes:
        pytest.skip(f"{name} does not compute in {dtype}")
    check(device.ops, case, dtype, device.torch_device, TOLERANCES[dtype])


@EACH
def test_the_self_test_passes(name: str) -> None:
    assert [(r.check, r.detail) for r in check_device(opened(name)) if not r.passed] == []


@pytest.mark.parametrize("name", ["cpu", *NAMES])
def test_graphs_of_several_sizes_share_a_runner(name: str) -> None:
    device = opened(name)
    buffers = {size: torch.zeros(size, device=device.torch_device) for size in (1, 4)}
    runner = device.graph_runner()
    for size, buffer in buffers.items():
        runner.capture(size, lambda buffer=buffer: buffer * 2 + 1)  # type: ignore[misc]
    for number in (3.0, 5.0):
        for size, buffer in buffers.items():
            buffer.fill_(number)
            runner.update(size, [1] * size)
            assert runner.replay(size).tolist() == [2 * number + 1] * size
    for wrong in (lambda: runner.replay(8), lambda: runner.update(8, [1] * 8)):
        with pytest.raises(KeyError):
            wrong()
    with pytest.raises(ValueError, match="pad them to 4"):
        runner.update(4, [1, 1])


@EACH
def test_a_step_in_pieces_calls_what_is_between_them(name: str) -> None:
    device = opened(name)
    numbers, staged, seen = (torch.zeros(2, device=device.torch_device) for _ in range(3))
    runner = device.graph_runner()
    if runner.captures and not runner.cuts:
        pytest.skip(f"not run: {runner.name}s are not in pieces")

    def between() -> None:
        seen.add_(staged)

    def step() -> torch.Tensor:
        staged.copy_(numbers * 2)
        runner.cut(between)
        return seen + 1

    runner.capture(2, step)
    seen.zero_()
    for number, expected in ((3.0, 7.0), (5.0, 17.0)):
        numbers.fill_(number)
        assert runner.replay(2).tolist() == [expected] * 2


@EACH
def test_the_peak_of_memory_is_that_since_it_was_reset(name: str) -> None:
    device, size = opened(name), 64 << 20
    before = device.reset_peak_memory()
    data = torch.empty(size, dtype=torch.uint8, device=device.torch_device)
    assert device.peak_memory() - before >= size
    room = device.headroom()
    del data
    assert device.headroom() >= room + size, "what the allocator keeps is room too"
