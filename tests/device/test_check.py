"""The smoke test passes on this machine's CPU, and names the fault of a broken device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from device.base import AttentionOps, AttentionPlan, EagerRunner, GraphRunner
from device.check import check_device
from device.cpu import CpuDevice
from device.ops.cpu import CpuOps


class OneTypeCpu(CpuDevice):
    """A CPU that is checked in one dtype, which takes a third of the time."""

    dtypes = (torch.float32,)  # type: ignore[assignment]

    def __init__(self, ops: AttentionOps | None = None) -> None:
        super().__init__()
        if ops is not None:
            self.ops = ops


def failed(device: CpuDevice) -> dict[str, str]:
    return {result.check: result.detail for result in check_device(device) if not result.passed}


def test_the_cpu_passes() -> None:
    results = list(check_device(CpuDevice()))
    assert [result for result in results if not result.passed] == []
    assert all(result.detail for result in results)
    assert {f"operators, {dtype}" for dtype in ("float32", "bfloat16", "float16")} < {one.check for one in results}


class ScaledAttention(CpuOps):
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, kv_layer: Tensor, plan: AttentionPlan, scale: float
    ) -> Tensor:
        return super().attend(query, key, value, kv_layer, plan, scale * 1.1)


class StaleRunner(EagerRunner):
    """Replays what it captured, whatever the lengths are by then."""

    def capture(self, size: int, step: Callable[[], Tensor]) -> None:
        output = step()
        super().capture(size, lambda: output)


class StaleGraphs(OneTypeCpu):
    def graph_runner(self) -> GraphRunner:
        return StaleRunner()


@pytest.mark.parametrize(
    ("device", "checks"),
    [
        (OneTypeCpu(ScaledAttention()), {"operators, float32", "captured decode step"}),
        (StaleGraphs(), {"captured decode step"}),
    ],
    ids=["scaled attention", "stale graphs"],
)
def test_a_fault_is_found(device: CpuDevice, checks: set[str]) -> None:
    assert set(failed(device)) == checks
