"""The self-test: passes on this machine's CPU, and reports what a broken device does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from device.base import (
    AttentionOps,
    AttentionPlan,
    EagerRunner,
    Event,
    GraphRunner,
    Partition,
    PartitionStrength,
    Stream,
)
from device.check.kernels import CheckResult, _shares, check_device, rate_text
from device.cpu import CpuDevice
from device.emulated.accelerator import EmulatedDevice
from device.ops.cpu import CpuOps
from device.registry import get_device


def run(device: CpuDevice) -> dict[str, CheckResult]:
    return {result.check: result for result in check_device(device)}


def failed(device: CpuDevice) -> dict[str, CheckResult]:
    return {name: result for name, result in run(device).items() if not result.passed}


class OneTypeCpu(CpuDevice):
    """A CPU that is checked in one dtype, which takes a third of the time."""

    dtypes = (torch.float32,)  # type: ignore[assignment]

    def __init__(self, ops: AttentionOps | None = None) -> None:
        super().__init__()
        if ops is not None:
            self.ops = ops


def test_the_cpu_passes() -> None:
    results = run(CpuDevice())
    assert [result.detail for result in results.values() if not result.passed] == []
    assert all(result.advice is None and result.detail for result in results.values())
    for dtype in ("float32", "bfloat16", "float16"):
        assert f"attention over the paged cache, {dtype}" in results


class ScaledAttention(CpuOps):
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, kv_layer: Tensor, plan: AttentionPlan, scale: float
    ) -> Tensor:
        return super().attend(query, key, value, kv_layer, plan, scale * 1.1)


@pytest.mark.parametrize(
    ("rate", "text"), [(12.34, "12.3 GB/s"), (0.1, "0.1 GB/s"), (0.04, "40.0 MB/s"), (0.00002, "20.0 kB/s")]
)
def test_a_rate_is_shown_in_a_unit_in_which_it_is_no_zero(rate: float, text: str) -> None:
    assert rate_text(rate) == text


def test_a_wrong_operator_is_reported_with_its_error_and_what_to_do() -> None:
    wrong = failed(OneTypeCpu(ScaledAttention()))
    assert set(wrong) == {"attention over the paged cache, float32", "captured decode step"}
    result = wrong["attention over the paged cache, float32"]
    assert "numbers differ from the oracle's" in result.detail
    assert result.advice is not None and "do not serve on cpu" in result.advice


class RaisingTower(CpuOps):
    def encode(
        self, query: Tensor, key: Tensor, value: Tensor, cu_seqlens_host: Sequence[int], scale: float
    ) -> Tensor:
        raise ZeroDivisionError("no kernel for this head size")


def test_an_operator_that_raises_is_a_failed_row() -> None:
    wrong = failed(OneTypeCpu(RaisingTower()))
    assert set(wrong) == {"vision tower's attention, float32"}
    assert wrong["vision tower's attention, float32"].detail == "ZeroDivisionError: no kernel for this head size"


class LastOfEquals(CpuOps):
    def argmax(self, logits: Tensor) -> Tensor:
        return logits.shape[-1] - 1 - logits.flip(-1).argmax(dim=-1)


def test_the_last_of_equals_is_not_the_first() -> None:
    assert set(failed(OneTypeCpu(LastOfEquals()))) == {"norms, rotary, SwiGLU, argmax, float32"}


class StaleRunner(EagerRunner):
    """Replays what it captured, whatever the lengths are by then."""

    def capture(self, size: int, step: Callable[[], Tensor]) -> None:
        output = step()
        super().capture(size, lambda: output)


class StaleGraphs(OneTypeCpu):
    def graph_runner(self) -> GraphRunner:
        return StaleRunner()


def test_a_graph_that_keeps_the_lengths_of_its_capture_is_found() -> None:
    assert set(failed(StaleGraphs())) == {"captured decode step"}


class FullMemory(OneTypeCpu):
    def memory(self) -> tuple[int, int]:
        return 1 << 30, 0


class CapWithoutEffect(OneTypeCpu):
    partition = Partition(strength=PartitionStrength.COOPERATIVE, mechanisms=("memory fraction",))

    def set_memory_fraction(self, fraction: float) -> None:
        return

    def memory(self) -> tuple[int, int]:
        return 1 << 30, 1 << 29


class LossyPinning(OneTypeCpu):
    def pin_memory(self, tensor: Tensor) -> Tensor:
        return tensor.clone().clamp_(min=0)


class DeadEvents(OneTypeCpu):
    def event(self, enable_timing: bool = False) -> Event:
        raise RuntimeError("driver version is insufficient")


@pytest.mark.parametrize(
    ("device", "check", "detail"),
    [
        (FullMemory(), "memory", "0 of 1073741824 bytes free"),
        (CapWithoutEffect(), "memory", "an allocation of twice the memory fraction was granted"),
        (LossyPinning(), "host copies", "the bytes came back changed"),
        (DeadEvents(), "streams and events", "RuntimeError: driver version is insufficient"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, CpuDevice) else None,
)
def test_other_faults_are_named(device: CpuDevice, check: str, detail: str) -> None:
    assert {name: result.detail for name, result in failed(device).items()} == {check: detail}


class Unlimited(EmulatedDevice):
    def stream(self, priority: int = 0, share: float | None = None) -> Stream:
        return super().stream(priority)


def test_a_share_of_a_stream_that_limits_nothing_is_found() -> None:
    assert "an eighth of the arithmetic" in _shares(get_device("emulated:h100:8"))
    assert "a CPU limits no stream to a share" in _shares(get_device("cpu"))
    with pytest.raises(AssertionError, match=r"with an eighth of the arithmetic work takes [01]\.\d times"):
        _shares(Unlimited("h100", 17))


def test_checks_from_elsewhere_run_with_the_others() -> None:
    def broken(device: object) -> str:
        raise OSError("no route to host")

    results = {r.check: r for r in check_device(OneTypeCpu(), {"transport": (broken, "look at the cable")})}
    assert results["transport"].detail == "OSError: no route to host"
    assert results["transport"].advice == "look at the cable"
