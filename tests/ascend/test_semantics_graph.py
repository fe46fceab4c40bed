"""Captured decode steps: torch_npu's bookkeeping gives each replay its own lengths."""

from __future__ import annotations

import pytest
from ascend_ladder import require_torch_npu
from decode_step import DecodeStep

require_torch_npu()

import ascend_host  # noqa: E402
import ascend_kernels  # noqa: E402
import torch  # noqa: E402

from device.ascend import NPUGraphRunner  # noqa: E402
from device.ops.ascend import V1, V2, AscendOps, FusedAttention, Layout  # noqa: E402  # noqa: E402

ascend_kernels.register()


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    ascend_host.emulate_graphs(monkeypatch)


def runner_of(ops: AscendOps) -> NPUGraphRunner:
    return NPUGraphRunner(torch.device("npu:0"), ops.attention.context_lens)


@pytest.mark.parametrize("version", [V1, V2], ids=["v1", "v2"])
@pytest.mark.parametrize("layout", ["TND", "BSND"])
def test_each_replay_has_its_lengths(version: FusedAttention, layout: Layout) -> None:
    ops = AscendOps(attention=version, layout=layout)
    runner = runner_of(ops)
    steps = {size: DecodeStep(ops, size) for size in (1, 3)}
    for size, step in steps.items():
        runner.capture(size, step.run)
    for size, context_lens in [(3, [1, 16, 17]), (1, [40]), (3, [2, 17, 18]), (3, [64, 1, 33]), (1, [41])]:
        step = steps[size]
        step.fill(context_lens)
        runner.update(size, context_lens)
        output = runner.replay(size).clone()
        torch.testing.assert_close(output, step.eager(context_lens))
        assert not torch.allclose(output, step.eager([n % 64 + 1 for n in context_lens])), "lengths matter"


def test_an_unknown_size_and_a_wrong_number_of_lengths_are_refused() -> None:
    ops = AscendOps()
    runner = runner_of(ops)
    runner.capture(2, DecodeStep(ops, 2).run)
    with pytest.raises(KeyError):
        runner.update(4, [1, 1, 1, 1])
    with pytest.raises(KeyError):
        runner.replay(4)
    with pytest.raises(ValueError, match="3 context lengths for a graph of 2"):
        runner.update(2, [1, 1, 1])


def test_a_replay_without_its_update_is_refused() -> None:
    """On the device it would wait for an event that nobody records."""
    ops = AscendOps()
    runner = runner_of(ops)
    step = DecodeStep(ops, 1)
    runner.capture(1, step.run)
    with pytest.raises(AssertionError, match="update binds the lengths"):
        runner.replay(1)
    runner.update(1, [5])
    runner.replay(1)
    with pytest.raises(AssertionError, match="update binds the lengths"):
        runner.replay(1)
