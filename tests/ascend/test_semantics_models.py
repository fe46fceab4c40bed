"""The tiny models on the Ascend operators, eager and captured, give the tokens of the plain-torch path."""

from __future__ import annotations

from pathlib import Path

import pytest
from ascend_ladder import require_torch_npu
from pictures import noise
from tiny_models import KINDS, make_tiny_model

require_torch_npu()

import ascend_host  # noqa: E402
import ascend_kernels  # noqa: E402
import torch  # noqa: E402
from engine_bench import EngineBench  # noqa: E402

from device.ascend import NPUGraphRunner  # noqa: E402
from device.base import Device, EagerRunner, GraphRunner  # noqa: E402
from device.cpu import CpuDevice  # noqa: E402
from device.ops.ascend import AscendOps, Layout  # noqa: E402
from epd_serve.sched.schedule import Budget  # noqa: E402

ascend_kernels.register()

#: Fewer than any prompt has: contexts of several chunks, images across their borders.
CHUNK = 30
Answers = dict[tuple[str, int], list[int]]


class HostNPU(CpuDevice):
    """The Ascend operators on the host's memory."""

    def __init__(self, layout: Layout, *, captures: bool) -> None:
        super().__init__()
        self.ops = ops = AscendOps(layout=layout)
        lens = ops.attention.context_lens
        self.runner: GraphRunner = NPUGraphRunner(torch.device("npu:0"), lens) if captures else EagerRunner()

    def graph_runner(self) -> GraphRunner:
        return self.runner


def tokens_of(path: Path, device: Device) -> Answers:
    budget = Budget(max_num_tokens=CHUNK, max_num_seqs=6)
    bench = EngineBench(path, budget, num_blocks=12, device=device, block_size=128)
    pictures = [noise(seed, (84, 56)) for seed in range(3)]
    bench.encode(pictures)
    # prompts within a block and across the border of the first, and decodes that cross it
    for number, (picture, words) in enumerate(zip(pictures, (10, 130, 84), strict=True)):
        bench.engine.submit(bench.sequence(f"{number}", "apple " * words, [picture], max_tokens=8 + 4 * number))
    answers = bench.collect(3)
    bench.check_idle()
    bench.close()
    return answers


@pytest.fixture(scope="module", params=KINDS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def expected(path: Path) -> Answers:
    return tokens_of(path, CpuDevice())


@pytest.mark.parametrize("layout", ["TND", "BSND"])
@pytest.mark.parametrize("captures", [False, True], ids=["eager", "graphs"])
def test_the_tokens_are_those_of_plain_torch(
    layout: Layout, captures: bool, path: Path, expected: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    if captures:
        ascend_host.emulate_graphs(monkeypatch)
    device = HostNPU(layout, captures=captures)
    assert tokens_of(path, device) == expected
    if isinstance(device.runner, NPUGraphRunner):
        assert any(entry.replayed for entry in device.runner._captured.values())
    assert len({tuple(tokens) for tokens in expected.values()}) == 3, "the prompts answer differently"
