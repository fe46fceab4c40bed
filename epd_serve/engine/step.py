"""Computing a step on one rank: eagerly, or where it is decodes alone as a captured graph of padded size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from device.base import AttnMeta, Device, GraphRunner
from device.copies import to_device
from epd_serve.engine.commands import CreateCache
from epd_serve.engine.decode_tables import DeviceTables
from epd_serve.engine.prefill_graphs import PrefillGraphs
from epd_serve.engine.sampling.sampler import PromptLogprobs
from epd_serve.engine.step_inputs import Fed, StepInputs, block_table, integers
from epd_serve.models.decoder import StepContext
from epd_serve.models.language import LanguageModel

if TYPE_CHECKING:
    from epd_serve.engine.emulated.emulation import Emulation


class StepExecutor:
    """A rank's share of the language model over its share of the KV.

    Args:
        kv: [layers, 2, num_blocks, block_size, kv_heads, head_dim].
        graph_sizes: decode batch sizes to capture, where the device can; empty: none.
        max_num_seqs: decodes of a step at most.
        prefill_graph_sizes: the same for numbers of tokens of steps with prompts.
        max_model_len: longest context of a sequence that decodes, and of a captured step.
        emulation: the time of steps on an emulated device; None: as long as they take.

    Attributes:
        num_seats: rows of the block tables of decodes.
    """

    def __init__(
        self,
        model: LanguageModel,
        device: Device,
        kv: Tensor,
        *,
        num_position_axes: int,
        graph_sizes: Sequence[int],
        max_num_seqs: int,
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
        self.num_seats = max([max_num_seqs, *graph_sizes])
        self._tables = DeviceTables(
            self.device,
            num_seats=self.num_seats,
            max_blocks=-(-max_model_len // kv.shape[3]),
            block_size=kv.shape[3],
        )
        self._graphs: DecodeGraphs | None = None
        graphs = device.graph_runner()
        if graph_sizes and graphs.captures and model.capturable:
            self._graphs = DecodeGraphs(
                model,
                device,
                graphs,
                kv,
                self._tables,
                num_position_axes=num_position_axes,
                sizes=graph_sizes,
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
            max_num_seqs=cache.max_num_seqs,
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
            fed: the tokens of the inputs' ``fed_rows``, on the first rank's device. Others have them from there,
                as they have the features.
            logprobs: takes those of the inputs' ``scored_rows``, which all ranks compute.
        """
        self._tables.update(inputs.decodes, inputs.decode_context_lens)
        if self._emulation is None:
            return self._compute(inputs, on_layer, fed, logprobs)
        slots = integers(inputs.slots, self.device)
        if count := len(inputs.decode_context_lens):
            slots = torch.cat([self._tables.next_slots(count), slots])
        if on_layer is None:
            with self._emulation.step(inputs, self._kv, slots, 1):
                return self._compute(inputs, None, fed, logprobs)
        tell = on_layer
        with self._emulation.step(inputs, self._kv, slots, self._model.num_layers + 1) as next_part:

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
        meta, positions = self._pack(inputs)
        plan = self._device.ops.prepare(meta, self._model.dtype)
        features, ids = inputs.features, integers(inputs.ids, target)
        if features is not None:  # from the first rank's device to the others'
            is_here = not features.is_meta
            features = to_device(features, target) if is_here else torch.empty_like(features, device=target)
            features = self._model.group.broadcast(features)
        if fed is not None:
            fed.put(ids)
        if inputs.scored_rows and logprobs is None:
            logprobs = PromptLogprobs(inputs, target)
        return self._model.forward(
            ids,
            positions,
            StepContext(
                plan=plan,
                kv=self._kv,
                on_layer=on_layer,
                both_ways=inputs.prefill_both_ways,
                states=to_device(torch.tensor(inputs.states), target) if inputs.states else None,
            ),
            integers(inputs.rows, target),
            features,
            None if features is None else integers(inputs.feature_rows, target),
            logprobs,
            self._prefill_graphs.forward
            if self._prefill_graphs is not None and self._prefill_graphs.fits(len(inputs.ids))
            else None,
        )

    def _pack(self, inputs: StepInputs) -> tuple[AttnMeta, Tensor]:
        """The sequences of a step that is computed eagerly, and the positions [axes, T] of its tokens."""
        target, count = self.device, len(inputs.decode_context_lens)
        slots, positions = integers(inputs.slots, target), to_device(inputs.positions, target)
        prefills = to_device(block_table(inputs.prefill_blocks), target)
        decodes, lens = prefills[:0], slots[:0]
        if count:
            width = -(-max(inputs.decode_context_lens) // self._kv.shape[3])
            own_slots, own_positions, decodes, lens = self._tables.advance(count, width)
            slots = torch.cat([own_slots, slots])
            positions = torch.cat([own_positions.expand(len(positions), -1), positions], dim=1)
        meta = AttnMeta(
            block_size=self._kv.shape[3],
            slot_mapping=slots,
            num_decodes=count,
            decode_block_table=decodes,
            decode_context_lens=lens,
            decode_context_lens_host=inputs.decode_context_lens,
            prefill_query_lens=inputs.prefill_query_lens,
            prefill_context_lens=inputs.prefill_context_lens,
            prefill_block_table=prefills,
        )
        return meta, positions


class DecodeGraphs:
    """Captures the model's decode step at its making; the steps read their inputs from buffers that stay.

    Args:
        kv: [layers, 2, num_blocks, block_size, kv_heads, head_dim].
        num_position_axes: rows of the rotary positions.
        sizes: sizes of the batches to capture, ascending; larger ones do not run here.
    """

    def __init__(
        self,
        model: LanguageModel,
        device: Device,
        graphs: GraphRunner,
        kv: Tensor,
        tables: DeviceTables,
        *,
        num_position_axes: int,
        sizes: Sequence[int],
    ) -> None:
        self._model = model
        self._device = device
        self._graphs = graphs
        self._kv = kv
        self._tables = tables
        self._num_position_axes = num_position_axes
        self._sizes = sizes
        self._ids = torch.zeros(sizes[-1], dtype=torch.long, device=device.torch_device)
        for size in reversed(self._sizes):  # the largest first: its memory pool serves the others
            graphs.capture(size, lambda size=size: self._step(size))  # type: ignore[misc]

    def fits(self, inputs: StepInputs) -> bool:
        """Whether the step consists of decodes alone and is not too large."""
        return not inputs.prefill_query_lens and 0 < len(inputs.ids) <= self._sizes[-1]

    def run(self, inputs: StepInputs, fed: Fed | None = None) -> Tensor:
        """Logits [decodes, vocab]; overwritten by the next run."""
        count = len(inputs.ids)
        size = next(size for size in self._sizes if size >= count)
        if len(inputs.fed_rows) < count:
            self._ids[:count].copy_(integers(inputs.ids, self._ids.device))
        if fed is not None:
            fed.put(self._ids)
        self._graphs.update(size, inputs.decode_context_lens + [1] * (size - count))
        return self._graphs.replay(size)[:count]

    def _step(self, size: int) -> Tensor:
        slots, positions, table, context_lens = self._tables.advance(size, self._tables.max_blocks)
        meta = AttnMeta(
            block_size=self._kv.shape[3],
            slot_mapping=slots,
            num_decodes=size,
            decode_block_table=table,
            decode_context_lens=context_lens,
            decode_context_lens_host=[1] * size,
            prefill_query_lens=[],
            prefill_context_lens=[],
            prefill_block_table=table[:0],
        )
        plan = self._device.ops.prepare(meta, self._model.dtype)
        context = StepContext(plan=plan, kv=self._kv)
        return self._model.forward(self._ids[:size], positions.expand(self._num_position_axes, -1), context)
