"""Steps with prompts as graphs in pieces, on an emulated device where what is not computed is no number."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_models
import torch
from engine_bench import BLOCK_SIZE, EngineBench
from pictures import noise

from device.emulated.accelerator import EmulatedDevice
from device.registry import get_device
from epd_serve.engine.step_inputs import StepInputs, block_table
from epd_serve.sched.schedule import Budget


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    device = get_device("emulated:h200")
    assert isinstance(device, EmulatedDevice)
    device.activate()
    yield device
    device.synchronize()


def prompt(bench: EngineBench, count: int, features: torch.Tensor | None = None) -> StepInputs:
    """A prompt of so many tokens from block 1 on; features stand for those from the third on."""
    rows = [] if features is None else list(range(2, 2 + len(features)))
    return StepInputs(
        ids=list(range(5, 5 + count)),
        positions=torch.arange(count).expand(bench.family.num_position_axes, -1),
        slots=list(range(BLOCK_SIZE, BLOCK_SIZE + count)),
        rows=[count - 1],
        decode_context_lens=[],
        decode_blocks=block_table([]),
        prefill_query_lens=[count],
        prefill_context_lens=[count],
        prefill_blocks=[list(range(1, 2 + (count - 1) // BLOCK_SIZE))],
        features=features,
        feature_rows=rows,
    )


@pytest.mark.parametrize("kind", ["qwen3_vl", pytest.param("qwen2_5_vl", marks=pytest.mark.slow)])
def test_logits_and_kv_equal_those_without_graphs(kind: str, tmp_path: Path, device: EmulatedDevice) -> None:
    """Also of a step after one with features, whose numbers lie in the same buffers, in few launches."""
    bench = EngineBench(
        tiny_models.make_tiny_model(kind, tmp_path / "model"),
        Budget(max_num_tokens=64, max_num_seqs=2),
        device=device,
    )
    try:
        graphs, kv = bench.executor._prefill_graphs, bench.memory.tensor
        assert graphs is not None
        bench.encode([noise(1)])
        (feature,) = bench.features.values()
        steps = [prompt(bench, 40), prompt(bench, 50, feature), prompt(bench, 41), prompt(bench, 7)]
        answers: list[list[torch.Tensor]] = []
        counts: list[int] = []
        layers: list[int] = []
        for bench.executor._prefill_graphs in (graphs, None):
            answers.append([])
            for inputs in steps:
                kv[:, :, 0].zero_()
                before = device.num_launches
                logits = bench.executor.compute(inputs, layers.append)
                counts.append(device.num_launches - before)
                answers[-1] += [logits.cpu(), kv.flatten(2, 3)[:, :, inputs.slots].cpu()]
                assert kv[:, :, 0].isfinite().all(), "where padding is written"
        num_layers = bench.memory.layout.num_layers
        assert layers == list(range(num_layers)) * 2 * len(steps)
        for one, expected in zip(*answers, strict=True):
            torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-5)
        captured, eager = counts[0], counts[len(steps)]
        assert captured < 3 * num_layers + 30 < 10 * num_layers < eager
    finally:
        bench.close()
