"""Computing a step on one rank: eagerly, or where it is decodes alone as a captured graph of padded size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from device.base import AttnMeta, Device, GraphRunner
from device.copies import to_device
from epd_serve.engine.commands import CreateCache
from epd_serve.engine.prefill_graphs import PrefillGraphs
from epd_serve.engine.sampling.sampler import PromptLogprobs
from epd_serve.engine.step_inputs import Fed, StepInputs, integers
from epd_serve.models.decoder import StepContext
from epd_serve.models.language import LanguageModel

if TYPE_CHECKING:
    from epd_serve.engine.emulated.emulation import Emulation


class StepExecutor:
    """A rank's share of the language model over its share of the KV.

    Args:
        kv: [layers, 2, num_blocks, block_size, kv_heads, head_dim].
        graph_sizes: decode batch sizes to capture, where the device can; empty: none.
        prefill_graph_sizes: the same for numbers of tokens of steps with prompts.
        max_model_len: longest context of a captured step.
        emulation: the time of steps on an emulated device; None: as long as they take.
    """

    def __init__(
        self,
        model: LanguageModel,
        device: Device,
        kv: Tensor,
        *,
        num_position_axes: int,
        graph_sizes: Sequence[int],
        max_model_len: int,
        prefill_graph_sizes: Sequence[int] = (),
        emulation: Emulation | None = None,
    ) -> None:
        self._emulation = emulation
        device.activate()  # of the thread that captures
        self._model = model
        self._device = device
        self.device = device.torch_device
        self._kv = kv
        self._graphs: DecodeGraphs | None = None
        graphs = device.graph_runner()
        if graph_sizes and graphs.captures and model.capturable:
            self._graphs = DecodeGraphs(
                model,
                device,
                graphs,
                kv,
                num_position_axes=num_position_axes,
                sizes=graph_sizes,
                max_blocks=-(-max_model_len // kv.shape[3]),
            )

        self._prefill_graphs: PrefillGraphs | None = None
        graphs = device.graph_runner()
        if prefill_graph_sizes and graphs.cuts and model.capturable:
            self._prefill_graphs = PrefillGraphs(
                model, device, graphs, kv, num_position_axes=num_position_axes, sizes=prefill_graph_sizes
            )

    @classmethod
    def for_cache(
        cls,
        model: LanguageModel,
        device: Device,
        kv: Tensor,
        cache: CreateCache,
        emulation: Emulation | None = None,
    ) -> StepExecutor:
        """Make the executor from the command that the leader sends to all ranks."""
        return cls(
            model,
            device,
            kv,
            num_position_axes=cache.num_position_axes,
            graph_sizes=cache.graph_sizes,
            max_model_len=cache.max_model_len,
            prefill_graph_sizes=cache.prefill_graph_sizes,
            emulation=emulation,
        )

    def activate(self) -> None:
        self._device.activate()

    def compute(
        self,
        inputs: StepInputs,
        on_layer: Callable[[int], None] | None = None,
        fed: Tensor | None = None,
        logprobs: PromptLogprobs | None = None,
    ) -> Tensor:
        """Logits [len(rows), vocab]; the step's K and V are in the cache afterwards.

        Args:
            on_layer: called when a layer's K and V are in the cache, in steps with prefills.
            fed: the tokens of the inputs' ``fed_rows``, on the first rank's device; others have them from there.
            logprobs: takes those of the inputs' ``scored_rows``, which all ranks compute.
        """
        if self._emulation is None:
            return self._compute(inputs, on_layer, fed, logprobs)
        if on_layer is None:
            with self._emulation.step(inputs, self._kv, 1):
                return self._compute(inputs, None, fed, logprobs)
        tell = on_layer
        with self._emulation.step(inputs, self._kv, self._model.num_layers + 1) as next_part:

            def after_layer(layer: int) -> None:
                next_part()
                tell(layer)

            return self._compute(inputs, after_layer, fed, logprobs)

    def _compute(
        self,
        inputs: StepInputs,
        on_layer: Callable[[int], None] | None,
        tokens: Tensor | None,
        logprobs: PromptLogprobs | None,
    ) -> Tensor:
        fed: Fed | None = None
        if inputs.fed_rows:
            if tokens is None:
                tokens = torch.empty(len(inputs.fed_rows), dtype=torch.long, device=self.device)
            fed = Fed(rows=inputs.fed_rows, tokens=self._model.group.broadcast(tokens))
        if self._graphs is not None and self._graphs.fits(inputs):
            return self._graphs.run(inputs, fed)
        target = self.device
        plan = self._device.ops.prepare(inputs.meta(self._kv.shape[3], target), self._model.dtype)
        features, ids = inputs.features, integers(inputs.ids, target)
        if fed is not None:
            fed.put(ids)
        if inputs.scored_rows and logprobs is None:
            logprobs = PromptLogprobs(inputs, target)
        return self._model.forward(
            ids,
            to_device(inputs.positions, target),
            StepContext(
                plan=plan,
                kv=self._kv,
                on_layer=on_layer,
                both_ways=inputs.prefill_both_ways,
                states=to_device(torch.tensor(inputs.states), target) if inputs.states else None,
            ),
            integers(inputs.rows, target),
            None if features is None else features.to(target),
            None if features is None else integers(inputs.feature_rows, target),
            logprobs,
            self._prefill_graphs.forward
            if self._prefill_graphs is not None and self._prefill_graphs.fits(len(inputs.ids))
            else None,
        )


class DecodeGraphs:
    """Captures the model's decode step at its making; the steps read their inputs from buffers that stay.

    Rows beyond a batch write into block 0, which belongs to no sequence, and see one token. Each has a slot of its
    own there as long as there are some: an NPU's write says nothing of slots that are written twice.

    Args:
        kv: [layers, 2, num_blocks, block_size, kv_heads, head_dim].
        num_position_axes: rows of the rotary positions.
        sizes: sizes of the batches to capture, ascending; larger ones do not run here.
        max_blocks: longest context, in blocks.
    """

    def __init__(
        self,
        model: LanguageModel,
        device: Device,
        graphs: GraphRunner,
        kv: Tensor,
        *,
        num_position_axes: int,
        sizes: Sequence[int],
        max_blocks: int,
    ) -> None:
        self._model = model
        self._device = device
        self._graphs = graphs
        self._kv = kv
        self._max_blocks = max_blocks
        self._sizes = sizes
        max_size = sizes[-1]
        target = device.torch_device
        self._ids = torch.zeros(max_size, dtype=torch.long, device=target)
        self._positions = torch.zeros(num_position_axes, max_size, dtype=torch.long, device=target)
        self._slots = torch.tensor(self._spare_slots(max_size), dtype=torch.long, device=target)
        self._table = torch.zeros(max_size, max_blocks, dtype=torch.long, device=target)
        self._context_lens = torch.ones(max_size, dtype=torch.long, device=target)
        for size in reversed(self._sizes):  # the largest first: its memory pool serves the others
            graphs.capture(size, lambda size=size: self._step(size))  # type: ignore[misc]

    def fits(self, inputs: StepInputs) -> bool:
        """Whether the step consists of decodes alone and is not too large."""
        return (
            not inputs.prefill_query_lens
            and 0 < len(inputs.ids) <= self._sizes[-1]
            and inputs.decode_blocks.shape[1] <= self._max_blocks
        )

    def run(self, inputs: StepInputs, fed: Fed | None = None) -> Tensor:
        """Logits [decodes, vocab]; overwritten by the next run."""
        count = len(inputs.ids)
        size = next(size for size in self._sizes if size >= count)
        padding = [0] * (size - count)
        context_lens = inputs.decode_context_lens + [1] * (size - count)
        self._fill(self._ids[:size], inputs.ids + padding)
        if fed is not None:
            fed.put(self._ids)
        self._fill(self._slots[:size], inputs.slots + self._spare_slots(size - count))
        self._fill(self._context_lens[:size], context_lens)
        self._positions[:, :count].copy_(inputs.positions, non_blocking=True)
        width = inputs.decode_blocks.shape[1]
        blocks = self._device.pin_memory(inputs.decode_blocks)
        self._table[:count, :width].copy_(blocks, non_blocking=True)
        self._table[count:size, :width].zero_()
        self._graphs.update(size, context_lens)
        return self._graphs.replay(size)[:count]

    def _spare_slots(self, count: int) -> list[int]:
        """Slots of block 0."""
        return [row % self._kv.shape[3] for row in range(count)]

    def _fill(self, buffer: Tensor, values: list[int]) -> None:
        buffer.copy_(self._device.pin_memory(torch.tensor(values, dtype=torch.long)), non_blocking=True)

    def _step(self, size: int) -> Tensor:
        empty = torch.empty(0, self._max_blocks, dtype=torch.long, device=self._device.torch_device)
        meta = AttnMeta(
            block_size=self._kv.shape[3],
            slot_mapping=self._slots[:size],
            num_decodes=size,
            decode_block_table=self._table[:size],
            decode_context_lens=self._context_lens[:size],
            decode_context_lens_host=[1] * size,
            prefill_query_lens=[],
            prefill_context_lens=[],
            prefill_block_table=empty,
        )
        plan = self._device.ops.prepare(meta, self._model.dtype)
        context = StepContext(plan=plan, kv=self._kv)
        return self._model.forward(self._ids[:size], self._positions[:, :size], context)
