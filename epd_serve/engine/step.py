"""One step: pack a schedule, compute it, sample.

A step of decodes alone may run as a captured graph of padded size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from device.base import AttnMeta, Device, GraphRunner
from device.copies import Readback, to_device
from epd_serve.engine.engine import SampledTokens
from epd_serve.engine.prefill_graphs import PrefillGraphs
from epd_serve.engine.sampling.sampler import PromptLogprobs, Row, Sampler, Sampling
from epd_serve.engine.step_inputs import DecodeTables, DeviceTables, StepInputs, on_device, pack_step
from epd_serve.models.decoder import StepContext
from epd_serve.models.language import LanguageModel
from epd_serve.sched.schedule import ScheduleOutput
from epd_serve.sched.sequence import Sequence as TokenSequence


class SampledRows:
    """The sequences of a step that get tokens, and a row per token; reused while the same sequences decode."""

    def __init__(self, sequences: list[TokenSequence]) -> None:
        self.sequences = sequences
        self.counts = [sequence.num_sampled for sequence in sequences]
        indices = [(s, range(s.index, s.index + n)) for s, n in zip(sequences, self.counts, strict=True)]
        self.rows = [Row(sequence, index) for sequence, own in indices for index in own]
        self.by_row = [row.sequence for row in self.rows]


@dataclass(eq=False)
class LaunchedStep:
    """A step on the device. Call :meth:`sample`, then :meth:`read`."""

    _sampler: Sampler
    _logits: Tensor
    _sampled: SampledRows
    _logprobs: PromptLogprobs | None
    _sampling: Sampling | None = None
    _computed: Readback | None = None

    def sample(self) -> None:
        """Launch the choice of tokens; all earlier tokens must be known."""
        if self._logprobs is not None:
            self._logprobs.send()
        rows, sequences = self._sampled.rows, self._sampled.sequences
        if not rows:
            self._computed = Readback(self._logits)  # empty: it marks the end of the step
            return
        logits = self._logits
        if len(rows) > len(sequences):
            place = {sequence: i for i, sequence in enumerate(sequences)}
            logits = logits[on_device([place[sequence] for sequence in self._sampled.by_row], logits.device)]
        self._sampling = self._sampler.sample(logits, rows)

    def tokens_of(self, sequences: Sequence[TokenSequence]) -> Tensor:
        """Return tokens [len(sequences)] on the device, possibly before they are chosen."""
        assert self._sampling is not None, "sample() comes first"
        tokens = self._sampling.tokens
        if sequences == self._sampled.by_row:
            return tokens
        places = {sequence: place for place, sequence in enumerate(self._sampled.by_row)}
        return tokens.index_select(0, on_device([places[sequence] for sequence in sequences], tokens.device))

    def read(self) -> SampledTokens:
        """Wait for the step, store log-probabilities in the sequences, and return the tokens."""
        if self._computed is not None:
            self._computed.wait()
        if self._logprobs is not None:
            self._logprobs.hand_out()
        if self._sampling is None:
            return []
        tokens = iter(self._sampling.read())
        counts = zip(self._sampled.sequences, self._sampled.counts, strict=True)
        return [(sequence, list(islice(tokens, count))) for sequence, count in counts]


class StepRunner:
    """Computes steps of the language model on the KV of its instance, and samples their tokens.

    Args:
        kv: [layers, 2, num_blocks, block_size, kv_heads, head_dim].
        graph_sizes: decode batch sizes to capture if the device can, ascending; empty: none.
        max_num_seqs: maximum decodes of a step.
        prefill_graph_sizes: numbers of tokens to capture of steps with prompts, ascending; empty: none.
        max_model_len: longest context of a decoding sequence, and of a captured step.
        max_num_tokens: maximum tokens of a step with prompts; 0 without such steps.
    """

    def __init__(
        self,
        model: LanguageModel,
        device: Device,
        kv: Tensor,
        *,
        num_position_axes: int,
        eos_token_ids: frozenset[int] = frozenset(),
        graph_sizes: Sequence[int] = (),
        max_num_seqs: int,
        max_model_len: int,
        prefill_graph_sizes: Sequence[int] = (),
        max_num_tokens: int = 0,
    ) -> None:
        device.activate()  # for the thread that captures
        self._model, self._device, self._kv = model, device, kv
        self._num_position_axes = axes = num_position_axes
        self._max_num_tokens = max_num_tokens
        self._sampler = Sampler(device.ops, eos_token_ids)
        self._decoding = SampledRows([])
        num_seats, block_size = max([max_num_seqs, *graph_sizes]), kv.shape[3]
        self._decode_tables = DecodeTables(block_size, num_seats)
        self._tables = DeviceTables(
            device.torch_device,
            num_seats=num_seats,
            max_blocks=-(-max_model_len // block_size),
            block_size=block_size,
        )
        self._graphs: GraphRunner | None = None
        self._prefill_graphs: PrefillGraphs | None = None
        self._graph_sizes = graph_sizes
        if graph_sizes and (graphs := device.graph_runner()).captures and model.capturable:
            self._graphs = graphs
            self._ids = torch.zeros(graph_sizes[-1], dtype=torch.long, device=device.torch_device)
            for size in reversed(graph_sizes):  # the largest first: the others reuse its memory pool
                graphs.capture(size, partial(self._decode, size))
        if prefill_graph_sizes and (graphs := device.graph_runner()).cuts and model.capturable:
            self._prefill_graphs = PrefillGraphs(
                model, device, graphs, kv, num_position_axes=axes, sizes=prefill_graph_sizes
            )

    def activate(self) -> None:
        """Make its device current for this thread, which will launch steps."""
        device, model = self._device, self._model
        device.activate()
        if model.num_query_heads:
            heads, most = (model.num_query_heads, model.num_kv_heads), self._max_num_tokens
            device.ops.build_plans(most, heads, model.head_dim, model.dtype, device.torch_device)

    def launch(
        self,
        output: ScheduleOutput,
        features_by_hash: Mapping[str, Tensor],
        on_layer: Callable[[int], None] | None = None,
        before: LaunchedStep | None = None,
    ) -> LaunchedStep:
        """Launch the scheduled tokens (:meth:`epd_serve.engine.step_loop.Runner.launch`)."""
        size, axes = self._kv.shape[3], self._num_position_axes
        inputs = pack_step(output, self._decode_tables, features_by_hash, block_size=size, num_axes=axes)
        fed = None
        if inputs.fed:
            assert before is not None, "placeholders need the previous step"
            fed = before.tokens_of(inputs.fed)
        logprobs = PromptLogprobs(inputs, self._device.torch_device) if inputs.scored else None
        logits = self.compute(inputs, on_layer, fed, logprobs)
        finished = [s for s, count in output.prefills if s.num_computed + count == s.num_tokens]
        if finished:
            sampled = SampledRows([*output.decodes, *finished])
        else:
            if output.decodes != self._decoding.sequences:
                self._decoding = SampledRows(output.decodes)
            sampled = self._decoding
        return LaunchedStep(self._sampler, logits, sampled, logprobs)

    def compute(
        self,
        inputs: StepInputs,
        on_layer: Callable[[int], None] | None = None,
        fed: Tensor | None = None,
        logprobs: PromptLogprobs | None = None,
    ) -> Tensor:
        """Return logits [len(rows), vocab], and write the step's K and V into the cache.

        ``fed``: tokens of the inputs' ``fed_rows``, on the device.
        """
        self._tables.update(inputs.decodes, inputs.decode_context_lens)
        is_decode = not inputs.prefill_query_lens and len(inputs.ids) > 0
        if self._graphs is not None and is_decode and len(inputs.ids) <= self._graph_sizes[-1]:
            return self._replay(self._graphs, inputs, fed)
        target, layers = self._device.torch_device, None
        meta, positions = self._pack(inputs)
        features, ids = inputs.features, on_device(inputs.ids, target)
        if features is not None:
            features = to_device(features, target)
        if fed is not None:
            inputs.feed(ids, fed)
        if self._prefill_graphs is not None and self._prefill_graphs.fits(len(inputs.ids)):
            layers = self._prefill_graphs.forward
        context = StepContext(
            plan=self._device.ops.prepare(meta, self._model.dtype),
            kv=self._kv,
            on_layer=on_layer,
            both_ways=inputs.prefill_both_ways,
            states=to_device(torch.tensor(inputs.states), target) if inputs.states else None,
        )
        rows = on_device(inputs.rows, target)
        feature_rows = None if features is None else on_device(inputs.feature_rows, target)
        return self._model.forward(ids, positions, context, rows, features, feature_rows, logprobs, layers)

    def _pack(self, inputs: StepInputs) -> tuple[AttnMeta, Tensor]:
        """Return the attention metadata of an eager step, and the positions [axes, T] of its tokens."""
        target, count = self._device.torch_device, len(inputs.decode_context_lens)
        slots, positions = on_device(inputs.slots, target), to_device(inputs.positions, target)
        table = np.zeros((len(inputs.prefill_blocks), max(map(len, inputs.prefill_blocks), default=0)), np.int32)
        for row, blocks in zip(table, inputs.prefill_blocks, strict=True):
            row[: len(blocks)] = blocks
        prefills = to_device(torch.from_numpy(table), target)
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

    def _replay(self, graphs: GraphRunner, inputs: StepInputs, fed: Tensor | None) -> Tensor:
        """Return logits [decodes, vocab] of a step of decodes alone; the next step overwrites them."""
        count = len(inputs.ids)
        size = next(size for size in self._graph_sizes if size >= count)
        if len(inputs.fed_rows) < count:
            self._ids[:count].copy_(on_device(inputs.ids, self._ids.device))
        if fed is not None:
            inputs.feed(self._ids, fed)
        graphs.update(size, inputs.decode_context_lens + [1] * (size - count))
        return graphs.replay(size)[:count]

    def _decode(self, size: int) -> Tensor:
        """Run the captured decode step, which reads its inputs from static buffers."""
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
