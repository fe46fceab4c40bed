"""The Ascend operators, eager and captured: the self-test passes, tiny models give the tokens of ``generate``."""

from __future__ import annotations

from pathlib import Path

import pytest
from ascend_ladder import require_torch_npu
from engine_bench import EngineBench
from pictures import noise
from reference import reference_of
from tiny_models import KINDS, make_tiny_model

require_torch_npu()

import ascend_host  # noqa: E402
import ascend_kernels  # noqa: E402
import torch  # noqa: E402

from device.ascend import NPUGraphRunner  # noqa: E402
from device.base import EagerRunner, GraphRunner  # noqa: E402
from device.check import check_device, random_step  # noqa: E402
from device.cpu import CpuDevice  # noqa: E402
from device.ops.ascend import AscendOps, Layout  # noqa: E402
from epd_serve.sched.schedule import Budget  # noqa: E402

ascend_kernels.register()

BLOCK_SIZE = 128
#: Shorter than any prompt: contexts of several chunks, images across their borders.
CHUNK = 30


class HostNPU(CpuDevice):
    """The Ascend operators on the host's memory."""

    dtypes = (torch.float32,)  # type: ignore[assignment]

    def __init__(self, layout: Layout, *, captures: bool = True) -> None:
        super().__init__()
        self.ops = AscendOps(layout=layout)
        self.runner: GraphRunner = NPUGraphRunner(torch.device("npu:0")) if captures else EagerRunner()

    def graph_runner(self) -> GraphRunner:
        return self.runner


@pytest.fixture(scope="module", params=KINDS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("layout", ["TND", "BSND"])
@pytest.mark.parametrize("captures", [False, True], ids=["eager", "graphs"])
def test_the_tokens_are_those_of_generate(
    layout: Layout, captures: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if captures:
        ascend_host.emulate_graphs(monkeypatch)
    device = HostNPU(layout, captures=captures)
    budget = Budget(max_num_tokens=CHUNK, max_num_seqs=6)
    bench = EngineBench(path, budget, num_blocks=20, block_size=BLOCK_SIZE, device=device)
    reference, picture = reference_of(path), noise(1, (84, 56))
    # within a block, across the border of the first, and short of it, so that decodes cross it
    texts = {name: "apple " * count for name, count in (("short", 10), ("long", 60), ("border", 48))}
    bench.encode([picture])
    for name, text in texts.items():
        bench.engine.submit(bench.sequence(name, text, [picture], max_tokens=16))
    answers = {name: tokens for (name, _), tokens in bench.collect(len(texts)).items()}
    bench.close()
    assert answers == {name: reference.generate(text, [picture], max_tokens=16) for name, text in texts.items()}
    if isinstance(device.runner, NPUGraphRunner):
        assert any(entry.replayed for entry in device.runner._captured.values())


@pytest.mark.parametrize("layout", ["TND", "BSND"])
def test_captured_steps_have_their_lengths(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's self-test: torch_npu's bookkeeping gives each replay its own."""
    ascend_host.emulate_graphs(monkeypatch)
    monkeypatch.setattr(HostNPU, "type", "npu")
    device = HostNPU(layout)
    assert [result for result in check_device(device) if not result.passed] == []
    with pytest.raises(AssertionError, match="update binds the lengths"):
        device.runner.replay(2)  # on the device it would wait for an event that nobody records


def test_an_unknown_size_and_a_wrong_number_of_lengths_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ascend_host.emulate_graphs(monkeypatch)
    device = HostNPU("TND")
    _, step = random_step(device.ops, torch.device("cpu"), torch.float32, (1, 40), (1, 300), size=BLOCK_SIZE)
    device.runner.capture(2, step)
    with pytest.raises(KeyError):
        device.runner.update(4, [1, 1, 1, 1])
    with pytest.raises(KeyError):
        device.runner.replay(4)
    with pytest.raises(ValueError, match="3 context lengths for a graph of 2"):
        device.runner.update(2, [1, 1, 1])
