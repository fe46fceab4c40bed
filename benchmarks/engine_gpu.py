"""Encode, prefill and decode of true shapes with random weights on one GPU, against what the GPU can do.

The part ``engine`` of ``python -m benchmarks.gpu``.

* ``encode``: the tower over one image and over four, by the clock until the features are on the host;
* ``prefill``: one prompt of 1k to 8k tokens in one step, in graphs where an instance uses them;
* ``decode``: steps of 1, 64 and 256 sequences with and without graphs, contexts of 2k tokens, and of 236 as in the
  part ``serve``;
* ``mixed``: 64 decodes and a chunk of a prompt in one step, with and without graphs;
* ``dual_stream``: encoding and decoding at once on two streams against one after the other (TriInfer, Figure 12).

``launches`` counts operators, copies and graphs that the host gives to the device.

``mfu`` is (2 x parameters of the layers x tokens) a second over the rate of a large bf16 product on this GPU, and
``bandwidth`` is (weights and KV read) a second over the rate of a large copy; both are measured in the same run.
"""

from __future__ import annotations

import dataclasses
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_timing import empty_cache, never_waiting, num_launches
from device.base import Device
from epd_serve.engine.prefill_graphs import prefill_graph_sizes
from epd_serve.engine.step import StepRunner
from epd_serve.engine.step_inputs import DecodeTables, StepInputs
from epd_serve.models.language import LanguageModel
from epd_serve.models.loader import load_family
from epd_serve.models.tower import Tower

ENGINE_SHAPES = ("Qwen2.5-VL-7B",)


def image_inputs(batch: int, grid: list[int], width: int) -> dict[str, Tensor]:
    """Random patches of ``batch`` images of (frames, rows, columns) patches, ``width`` numbers each."""
    generator = torch.Generator().manual_seed(0)
    patches = batch * grid[0] * grid[1] * grid[2]
    return {
        "pixel_values": torch.randn(patches, width, generator=generator),
        "image_grid_thw": torch.tensor([grid] * batch),
    }


def measure_shape(
    path: Path, device: Device, limits: Mapping[str, float], *, tiny: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the figures of a checkpoint, whose weights are loaded as an instance does it, one after another."""
    yield from _Model(path, device, limits, tiny=tiny).measure()
    empty_cache(device)


class _Model:
    """Tower and language model of one checkpoint with a KV cache for the largest case, each from its first use."""

    def __init__(self, path: Path, device: Device, limits: Mapping[str, float], *, tiny: bool) -> None:
        self._path, self._device, self._limits = path, device, limits
        self._block_size = 128 if device.type == "npu" else 16  # what Ascend's operators recommend
        self.prompts = [64, 128] if tiny else [1024, 2048, 8192]
        self.batches = [1, 4] if tiny else [1, 64, 256]
        self.beside = 4 if tiny else 64
        self.context, self.served_context = (64, 32) if tiny else (2048, 236)
        self.side = 8 if tiny else 64
        self.chunks = [16, 96] if tiny else [96, 480, 960, 2048]
        self._repeats = 2 if tiny else 20
        family = load_family(path)
        self._axes = family.num_position_axes
        self._patch_width = 6 * family.config.vision_config.patch_size**2
        text = family.config.get_text_config()
        self._table = text.vocab_size * text.hidden_size
        self._num_tables = 1 if family.config.tie_word_embeddings else 2

    @cached_property
    def _tower(self) -> Tower:
        return Tower(self._path, torch.bfloat16, self._device)

    @cached_property
    def _model(self) -> LanguageModel:
        return LanguageModel(self._path, torch.bfloat16, self._device)

    @cached_property
    def _kv(self) -> Tensor:
        model = self._model
        mixed = self.batches[-1] * (self.context + self._block_size) + self.chunks[-1] + self._block_size
        shape = (
            model.num_layers,
            2,
            max(*self.prompts, mixed) // self._block_size + 2,
            self._block_size,
            model.num_kv_heads,
            model.head_dim,
        )
        return torch.zeros(shape, dtype=torch.bfloat16, device=self._device.torch_device)

    @cached_property
    def _eager(self) -> StepRunner:
        return self._runner([], [])

    @cached_property
    def _graphs(self) -> StepRunner:
        return self._runner(self.batches, prefill_graph_sizes(max(self.prompts)))

    @property
    def _layer_parameters(self) -> int:
        return self._model.num_parameters - self._num_tables * self._table

    def _runner(self, graph_sizes: list[int], prefill_sizes: list[int]) -> StepRunner:
        runner = StepRunner(
            self._model,
            self._device,
            self._kv,
            num_position_axes=self._axes,
            graph_sizes=graph_sizes,
            max_num_seqs=max(self.batches),
            max_model_len=self.context + self._block_size,
            prefill_graph_sizes=prefill_sizes,
            max_num_tokens=max(self.prompts),
        )
        runner.activate()
        return runner

    def load(self) -> None:
        """Load the tower, and the language model with its graphs, on the current stream."""
        _ = self._tower, self._graphs

    def measure(self) -> Iterator[tuple[str, dict[str, Any]]]:
        yield "parameters", {"tower": self._tower.num_parameters, "language": self._model.num_parameters}
        for batch in self.batches:
            yield f"decode, batch {batch}", self._decode(batch, self.context)
        most = self.batches[-1]
        yield f"decode, batch {most}, contexts of {self.served_context}", self._decode(most, self.served_context)
        for length in self.prompts:
            yield f"prefill, {length} tokens", self._prefill(length)
        for batch in (1, 4):
            yield f"encode, {batch} x {self.side**2} patches", self._encode(batch)
        for count in self.chunks:
            yield f"mixed, {self.beside} + {count} tokens", self._mixed(count)
        for batch in self.batches[:2]:
            yield f"dual stream, batch {batch}", self._dual_stream(batch)

    def _seconds(self, call: Callable[[], object], repeats: int) -> float:
        """The median of some calls, each until the device is done."""
        times: list[float] = []
        for _ in range(repeats + 2):
            self._device.synchronize()
            start = time.perf_counter()
            call()
            self._device.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times[2:])

    def _mfu(self, parameters: int, tokens: int, seconds: float) -> float:
        return 2 * parameters * tokens / seconds / 1e12 / self._limits["bf16_matmul_tflop_s"]

    def _mixed(self, count: int) -> dict[str, Any]:
        inputs = self._inputs(decodes=self.beside, prefill=[count])
        return self._compare(partial(self._eager.compute, inputs), partial(self._graphs.compute, inputs))

    def _compare(self, eager: Callable[[], object], graph: Callable[[], object]) -> dict[str, Any]:
        """Milliseconds and launches without graphs and with them."""
        result: dict[str, Any] = {}
        for name, call in (("eager", eager), ("graph", graph)):
            seconds = self._seconds(call, self._repeats)
            result[name] = {"ms": seconds * 1e3, "launches": num_launches(self._device, call)}
        return result | {"graph_gain": result["eager"]["ms"] / result["graph"]["ms"]}

    def _encode_call(self, batch: int) -> Callable[[], object]:
        inputs = image_inputs(batch, [1, self.side, self.side], self._patch_width)
        return partial(self._tower.encode, [inputs])

    def _encode(self, batch: int) -> dict[str, float]:
        seconds = self._seconds(self._encode_call(batch), 5)
        mfu = self._mfu(self._tower.num_parameters, batch * self.side**2, seconds)
        return {"ms": seconds * 1e3, "images_s": batch / seconds, "mfu": mfu}

    def _prefill(self, length: int) -> dict[str, float]:
        inputs = self._inputs(prefill=[length])
        seconds = self._seconds(partial(self._graphs.compute, inputs), 5)
        return {
            "ms": seconds * 1e3,
            "eager_ms": self._seconds(partial(self._eager.compute, inputs), 5) * 1e3,
            "tokens_s": length / seconds,
            "mfu": self._mfu(self._layer_parameters, length, seconds),
        }

    def _decode(self, batch: int, context: int) -> dict[str, Any]:
        inputs = self._inputs(decodes=batch, context=context)
        again = dataclasses.replace(inputs, decodes=dataclasses.replace(inputs.decodes, writes=[]))
        kv_bytes = batch * context * self._kv[:, :, 0, 0].numel() * 2
        result: dict[str, Any] = {}
        for name, runner in (("graph", self._graphs), ("eager", self._eager)):
            runner.compute(inputs)
            with never_waiting(self._device):
                runner.compute(again)
            seconds = self._seconds(partial(runner.compute, again), self._repeats)
            read = (2 * (self._layer_parameters + self._table) + kv_bytes) / seconds / 1e9
            result[name] = {
                "ms": seconds * 1e3,
                "tokens_s": batch / seconds,
                "bandwidth": read / self._limits["copy_gb_s"],
            }
        result["graph_gain"] = result["eager"]["ms"] / result["graph"]["ms"]
        return result

    def _dual_stream(self, batch: int) -> dict[str, float]:
        """As long as one image is encoded after another, decode; then both once more, one after the other."""
        encode, inputs = self._encode_call(1), self._inputs(decodes=batch)
        step = partial(self._graphs.compute, inputs)
        steps = max(1, round(self._seconds(encode, 3) / self._seconds(step, 3)))

        def repeat(call: Callable[[], object], count: int, low_priority: bool) -> None:
            self._device.activate()
            with self._device.stream(0 if low_priority else -1) as stream:
                for _ in range(count):
                    call()
                stream.synchronize()

        jobs = [(encode, self._repeats, True), (step, self._repeats * steps, False)]

        def together() -> None:
            threads = [threading.Thread(target=repeat, args=job) for job in jobs]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        def in_turn() -> None:
            for job in jobs:
                repeat(*job)

        sequential, dual = self._seconds(in_turn, 1), self._seconds(together, 1)
        return {"sequential_ms": sequential * 1e3, "dual_ms": dual * 1e3, "gain": sequential / dual}

    def _inputs(
        self, *, decodes: int = 0, context: int | None = None, prefill: list[int] | None = None
    ) -> StepInputs:
        """Decodes at the end of their context, or prompts, over blocks of their own."""
        prefill = prefill or []
        lengths = [context or self.context] * decodes + prefill
        first, blocks = 1, []
        for length in lengths:
            count = -(-length // self._block_size)
            blocks.append(list(range(first, first + count)))
            first += count
        positions = [i for length in prefill for i in range(length)]
        slots = [
            own[i // self._block_size] * self._block_size + i % self._block_size
            for own, length in zip(blocks[decodes:], prefill, strict=True)
            for i in range(length)
        ]
        rows = list(range(decodes))
        for length in prefill:
            rows.append((rows[-1] if rows else -1) + length)
        return StepInputs(
            ids=[16 + i % 900 for i in (*range(decodes), *positions)],
            # Not a view: torch pins no memory in which several numbers share an address.
            positions=torch.tensor(positions, dtype=torch.long).repeat(self._axes, 1),
            slots=slots,
            rows=rows,
            decode_context_lens=lengths[:decodes],
            decodes=DecodeTables(self._block_size, max(self.batches)).change(
                blocks[:decodes], lengths[:decodes], [0] * decodes
            ),
            prefill_query_lens=prefill,
            prefill_context_lens=prefill,
            prefill_blocks=blocks[decodes:],
            features=None,
            feature_rows=[],
        )
