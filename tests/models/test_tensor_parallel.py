"""Ranks as threads of one process: every width computes what one rank does, and takes over the KV of any other.

The tiny models have four query and two KV heads: four ranks share each KV head by two.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from device.distributed import Alone, Group
from device.registry import get_device
from epd_serve.engine.kv_memory import KVCache, block_nbytes
from epd_serve.engine.step import StepExecutor
from epd_serve.engine.step_inputs import DecodeTables, StepInputs
from epd_serve.models.language import LanguageModel
from epd_serve.models.loader import load_family
from epd_serve.protocol.wire import KVLayout

BLOCK_SIZE, NUM_BLOCKS, CHUNK, NUM_TOKENS = 4, 6, 7, 14
#: The prompt's first chunk, its second, and a token after it.
STEPS = ((0, CHUNK), (CHUNK, NUM_TOKENS - 1), (NUM_TOKENS - 1, NUM_TOKENS))


class Threads:
    """Fills the Group protocol for ranks that are threads."""

    def __init__(self, rank: int, barrier: threading.Barrier, shared: list[Tensor]) -> None:
        self.rank, self.size = rank, barrier.parties
        self._barrier = barrier
        self._shared = shared

    def _exchange(self, own: Tensor) -> list[Tensor]:
        self._shared[self.rank] = own.clone()
        self._barrier.wait(60)
        all_parts = list(self._shared)
        self._barrier.wait(60)
        return all_parts

    def all_reduce(self, partial: Tensor) -> Tensor:
        return torch.stack(self._exchange(partial)).sum(0)

    def all_gather(self, part: Tensor) -> Tensor:
        return torch.cat(self._exchange(part), dim=-1)

    def broadcast(self, own: Tensor) -> Tensor:
        return self._exchange(own)[0]


class Instance:
    """The language model over ``width`` ranks with one slab between them."""

    def __init__(self, path: Path, width: int) -> None:
        device, barrier = get_device("cpu"), threading.Barrier(width)
        shared = [torch.empty(0)] * width
        groups: list[Group] = [Threads(rank, barrier, shared) for rank in range(width)] if width > 1 else [Alone()]
        models = [LanguageModel(path, torch.float32, device, group) for group in groups]
        self.model = models[0]
        self._layout = KVLayout(
            num_layers=self.model.num_layers,
            num_kv_heads=self.model.num_kv_heads,
            head_dim=self.model.head_dim,
            block_size=BLOCK_SIZE,
            dtype="float32",
            model="tiny",
        )
        self.slab = memoryview(bytearray(NUM_BLOCKS * block_nbytes(self._layout)))
        self.caches = [
            KVCache(self._layout, NUM_BLOCKS, device, self.slab, group.rank, group.size) for group in groups
        ]
        self.executors = [
            StepExecutor(
                model, device, cache.tensor, num_position_axes=1, graph_sizes=(), max_num_seqs=1, max_model_len=64
            )
            for model, cache in zip(models, self.caches, strict=True)
        ]

    def compute(self, inputs: StepInputs) -> Tensor:
        """Logits of rank 0; all have the same."""
        logits: list[Tensor] = [torch.empty(0)] * len(self.executors)

        shape = None if inputs.features is None else torch.empty_like(inputs.features, device="meta")
        without = msgspec.structs.replace(inputs, features=shape)

        def run(rank: int) -> None:
            logits[rank] = self.executors[rank].compute(without if rank else inputs)

        _together([lambda rank=rank: run(rank) for rank in range(len(self.executors))])  # type: ignore[misc]
        for other in logits[1:]:
            assert torch.equal(other, logits[0])
        return logits[0]

    def take_over(self, other: Instance, blocks: list[int]) -> None:
        """As if the other's KV had come through the slab of this one."""
        self._copy(blocks, lands=False, of=other)
        self._cells(blocks).copy_(other._cells(blocks))
        self._copy(blocks, lands=True, of=self)

    def _cells(self, blocks: list[int]) -> Tensor:
        if len(self.caches) == 1:
            return self.caches[0].tensor[:, :, blocks[0] : blocks[-1] + 1]
        return self.caches[0].cells(0, self._layout.num_layers, len(blocks))

    def _copy(self, blocks: list[int], *, lands: bool, of: Instance) -> None:
        for cache in of.caches if len(of.caches) > 1 else []:
            cache.copy(range(self._layout.num_layers), blocks, 0, lands=lands)


def _together(calls: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def steps(path: Path, model: LanguageModel) -> list[StepInputs]:
    """A prompt in two chunks, with features in both, and one decode."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 200, (NUM_TOKENS,), generator=generator).tolist()
    axes = load_family(path).num_position_axes
    features = torch.randn(4, model.feature_width, generator=generator)
    made = []
    for start, end in STEPS:
        blocks = list(range(1, 1 + -(-end // BLOCK_SIZE)))
        decodes = end - start == 1
        made.append(
            StepInputs(
                ids=ids[start:end],
                positions=torch.arange(start, start if decodes else end).expand(axes, -1).contiguous(),
                slots=[] if decodes else [BLOCK_SIZE + token for token in range(start, end)],
                rows=[end - start - 1],
                decode_context_lens=[end] if decodes else [],
                decodes=DecodeTables(BLOCK_SIZE, 1).change([blocks] if decodes else [], [end], [0]),
                prefill_query_lens=[] if decodes else [end - start],
                prefill_context_lens=[] if decodes else [end],
                prefill_blocks=[] if decodes else [blocks],
                features=None if decodes else features[: end - start],
                feature_rows=[] if decodes else [0, 1, 2, 3],
            )
        )
    return made


@pytest.fixture(scope="module", params=[*tiny_models.KINDS, "biased"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks") / request.param
    if request.param != "biased":
        return tiny_models.make_tiny_model(request.param, path)
    tiny_models.make_tiny_model("llava", path, mlp_bias=True, attention_bias=True, hidden_act="gelu_pytorch_tanh")
    weights = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(2)
    for name, weight in weights.items():
        if name.endswith("bias"):
            weights[name] = torch.randn(weight.shape, generator=generator)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_every_width_computes_the_same_and_continues_what_another_began(path: Path) -> None:
    """From split to whole and back, narrower and wider, and alone."""
    whole = Instance(path, 1)
    *prompt, decode = steps(path, whole.model)
    expected = [whole.compute(step) for step in (*prompt, decode)]
    widths = {width: Instance(path, width) for width in (1, 2, 4)}
    blocks = prompt[-1].prefill_blocks[0]
    for prefills in widths.values():
        for step, logits in zip(prompt, expected, strict=False):
            torch.testing.assert_close(prefills.compute(step), logits, rtol=1e-4, atol=1e-4)
        for decodes in widths.values():
            if decodes is not prefills:
                decodes.take_over(prefills, blocks)
            torch.testing.assert_close(decodes.compute(decode), expected[-1], rtol=1e-4, atol=1e-4)
            for cache in decodes.caches:
                cache.tensor.zero_()
            if decodes is prefills:
                for step in prompt:
                    prefills.compute(step)


def test_a_width_that_the_heads_do_not_divide_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match="4 query and 2 KV heads cannot be split over 3 devices"):
        Instance(path, 3)
