"""Steps with prompts as graphs in pieces, on a chip of tests, where what is not computed is no number."""

from __future__ import annotations

from pathlib import Path

import tiny_models
import torch
from chip.accelerator import ChipDevice
from torch import Tensor

from device.registry import get_device
from epd_serve.engine.step import StepExecutor
from epd_serve.engine.step_inputs import StepInputs, TableChange
from epd_serve.models.language import LanguageModel

BLOCK_SIZE, AXES, DECODED = 8, 3, 9


def inputs_of(start: int, count: int, features: Tensor | None = None) -> StepInputs:
    """A decode of ``DECODED`` tokens, and behind it the tokens of a prompt from ``start`` on; features stand for
    its third and those behind."""
    end = start + count
    return StepInputs(
        ids=[7, *range(5, 5 + count)],
        positions=torch.arange(start, end).expand(AXES, -1),
        slots=list(range(4 * BLOCK_SIZE + start, 4 * BLOCK_SIZE + end)),
        rows=[0, count],
        decode_context_lens=[DECODED],
        decodes=TableChange([(0, 0, [1, 2])], [0], [0]),
        prefill_query_lens=[count],
        prefill_context_lens=[end],
        prefill_blocks=[list(range(4, 4 + -(-end // BLOCK_SIZE)))],
        features=features,
        feature_rows=[] if features is None else list(range(3, 3 + len(features))),
    )


def test_logits_and_kv_equal_those_without_graphs(tmp_path: Path) -> None:
    """Chunks behind others, and with features, whose numbers lie in the same buffers; in few launches."""
    device = get_device("chip:0")
    assert isinstance(device, ChipDevice)
    device.activate()
    model = LanguageModel(tiny_models.make_tiny_model("qwen3_vl", tmp_path / "model"), torch.float32, device)
    shape = (model.num_layers, 2, 20, BLOCK_SIZE, model.num_kv_heads, model.head_dim)
    features = torch.randn(9, model.feature_width, generator=torch.Generator().manual_seed(0))
    answers: list[list[Tensor]] = []
    counts: list[int] = []
    layers: list[int] = []
    for sizes in ((), (8, 64)):
        kv = torch.zeros(shape, device=device.torch_device)
        executor = StepExecutor(
            model,
            device,
            kv,
            num_position_axes=AXES,
            graph_sizes=(),
            max_num_seqs=4,
            max_model_len=128,
            prefill_graph_sizes=sizes,
        )
        answers.append([])
        for inputs in (inputs_of(0, 40), inputs_of(40, 30, features), inputs_of(70, 7), inputs_of(77, 20)):
            before = device.chip.num_launches
            logits = executor.compute(inputs, layers.append)
            counts.append(device.chip.num_launches - before)
            answers[-1].append(logits.cpu())
        assert kv[:, :, 0].isfinite().all(), "where padding is written"
        answers[-1].append(kv[:, :, 1:].cpu())
    assert layers == list(range(model.num_layers)) * len(counts)
    for expected, found in zip(*answers, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    eager, captured = counts[0], counts[len(counts) // 2]
    assert captured < 4 * model.num_layers + 45 < 20 * model.num_layers < eager
