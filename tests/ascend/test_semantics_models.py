"""The tiny models on the Ascend operators, eager and captured, give the tokens of the plain-torch path."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from ascend_ladder import require_torch_npu
from pictures import noise
from tiny_models import KINDS, make_tiny_model

require_torch_npu()

import ascend_host  # noqa: E402
import ascend_kernels  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from device.ascend import NPUGraphRunner  # noqa: E402
from device.base import (  # noqa: E402
    Device,
    EagerRunner,
    GraphRunner,
)
from device.cpu import CpuDevice  # noqa: E402
from device.ops.ascend import AscendOps, Layout  # noqa: E402
from epd_serve.engine.step import StepRunner  # noqa: E402
from epd_serve.engine.step_inputs import DecodeTables, StepInputs  # noqa: E402
from epd_serve.models.family import picture  # noqa: E402
from epd_serve.models.language import LanguageModel  # noqa: E402
from epd_serve.models.loader import load_family  # noqa: E402
from epd_serve.models.tower import Tower  # noqa: E402

ascend_kernels.register()

BLOCK_SIZE, BLOCKS_EACH, NEW_TOKENS = 128, 2, 8
IMAGE_START = 25
CHUNK = 30  # shorter than any prompt: contexts of several chunks, images across their borders


class HostNPU(CpuDevice):
    """The Ascend operators on the host's memory."""

    def __init__(self, layout: Layout, *, captures: bool) -> None:
        super().__init__()
        self._ascend = AscendOps(layout=layout)
        self.ops = self._ascend
        context_lens = self._ascend.attention.context_lens
        self.runner: GraphRunner = (
            NPUGraphRunner(torch.device("npu:0"), context_lens) if captures else EagerRunner()
        )

    def graph_runner(self) -> GraphRunner:
        return self.runner


@dataclass
class Request:
    """A prompt with one image in it, and what has become of it."""

    ids: list[int]
    positions: Tensor
    delta: int
    feature: Tensor
    feature_start: int
    blocks: list[int]
    num_computed: int = 0
    tokens: list[int] = field(default_factory=list)

    @property
    def is_prefilled(self) -> bool:
        return self.num_computed >= len(self.ids)

    def slots(self, start: int, end: int) -> list[int]:
        return [self.blocks[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(start, end)]


class Instance:
    """A tower and a language model on one device, stepped by hand: decodes, and one chunk of the next prompt."""

    def __init__(self, path: Path, device: Device, encoder: Device | None = None) -> None:
        self.family = load_family(path)
        self.tower = Tower(path, torch.float32, encoder or device)
        self.model = LanguageModel(path, torch.float32, device)
        self.ops = device.ops
        kv_shape = (self.model.num_layers, 2, 8, BLOCK_SIZE, self.model.num_kv_heads, self.model.head_dim)
        self.runner = StepRunner(
            self.model,
            device,
            torch.zeros(kv_shape),
            num_position_axes=self.family.num_position_axes,
            graph_sizes=[1, 6],  # with up to four rows of padding
            max_num_seqs=6,
            max_model_len=self.model.max_model_len,
        )
        self.tables = DecodeTables(BLOCK_SIZE, 6)

    def request(self, seed: int, length: int) -> Request:
        image = noise(seed, (84, 56))
        feature = self.tower.encode([self.family.preprocess(np.array(image))])[0]
        ids = [10 + i % 40 for i in range(length)]
        ids[IMAGE_START : IMAGE_START + len(feature)] = [self.family.token_ids["image"]] * len(feature)
        positions, delta = self.family.positions(ids, [picture(image.size)], self.model.inner)
        first = 1 + seed * BLOCKS_EACH
        blocks = [first + 1, first]  # not in order
        return Request(ids, positions, delta, feature, IMAGE_START, blocks)

    def generate(self, requests: list[Request]) -> list[list[int]]:
        while any(len(request.tokens) < NEW_TOKENS for request in requests):
            decodes = [r for r in requests if r.is_prefilled and len(r.tokens) < NEW_TOKENS]
            waiting = next((r for r in requests if not r.is_prefilled), None)
            logits = self.runner.compute(self._inputs(decodes, waiting))
            advanced = decodes
            if waiting is not None:
                waiting.num_computed += CHUNK
                advanced = [*decodes, waiting] if waiting.is_prefilled else decodes
            for request, token in zip(advanced, self.ops.argmax(logits).tolist(), strict=True):
                request.tokens.append(token)
        return [request.tokens for request in requests]

    def _inputs(self, decodes: list[Request], waiting: Request | None) -> StepInputs:
        lengths = [len(r.ids) + len(r.tokens) for r in decodes]
        axes = self.family.num_position_axes
        ids = [r.tokens[-1] for r in decodes]
        positions = torch.zeros(axes, 0, dtype=torch.long)
        slots: list[int] = []
        rows = list(range(len(decodes)))
        start = end = 0
        features: Tensor | None = None
        feature_rows: list[int] = []
        if waiting is not None:
            start, end = waiting.num_computed, min(waiting.num_computed + CHUNK, len(waiting.ids))
            low = max(start, waiting.feature_start)
            high = min(end, waiting.feature_start + len(waiting.feature))
            if low < high:
                features = waiting.feature[low - waiting.feature_start : high - waiting.feature_start]
                feature_rows = list(range(len(ids) + low - start, len(ids) + high - start))
            ids += waiting.ids[start:end]
            positions = waiting.positions[:, start:end]
            slots = waiting.slots(start, end)
            if end == len(waiting.ids):
                rows.append(len(ids) - 1)
        return StepInputs(
            ids=ids,
            positions=positions,
            slots=slots,
            rows=rows,
            decode_context_lens=lengths,
            decodes=self.tables.change([r.blocks for r in decodes], lengths, [r.delta for r in decodes]),
            prefill_query_lens=[end - start] if waiting else [],
            prefill_context_lens=[end] if waiting else [],
            prefill_blocks=[waiting.blocks[: -(-end // BLOCK_SIZE)]] if waiting else [],
            features=features,
            feature_rows=feature_rows,
        )


@pytest.fixture(scope="module", params=KINDS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(request.param, tmp_path_factory.mktemp(request.param))


def tokens_of(path: Path, device: Device, encoder: Device | None = None) -> list[list[int]]:
    instance = Instance(path, device, encoder)
    # Prompts within a block, across the border of the first, and short of it, so that decodes cross it.
    return instance.generate([instance.request(seed, length) for seed, length in enumerate((60, 140, 124))])


@pytest.fixture(scope="module")
def expected(path: Path) -> list[list[int]]:
    return tokens_of(path, CpuDevice())


@pytest.mark.parametrize("layout", ["TND", "BSND"])
@pytest.mark.parametrize("captures", [False, True], ids=["eager", "graphs"])
def test_the_tokens_are_those_of_plain_torch(
    layout: Layout, captures: bool, path: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if captures:
        ascend_host.emulate_graphs(monkeypatch)
    device = HostNPU(layout, captures=captures)
    assert tokens_of(path, device) == expected
    if isinstance(device.runner, NPUGraphRunner):
        assert any(entry.replayed for entry in device.runner._captured.values())
    assert len({tuple(tokens) for tokens in expected}) == 3, "the prompts answer differently"
