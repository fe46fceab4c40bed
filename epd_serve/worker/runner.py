"""One step on the device: pack the scheduled tokens, run the language model, sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from device.base import AttnMeta, Device
from epd_serve.models.decoder import StepContext
from epd_serve.models.language import LanguageModel
from epd_serve.request import Sequence
from epd_serve.sched.language import ScheduleOutput
from epd_serve.worker.kv_memory import KVMemory
from epd_serve.worker.sampler import Row, SampledToken, sample


@dataclass(frozen=True, slots=True)
class StepResult:
    """The tokens that a step sampled.

    ``first`` has the ``n`` first tokens of each sequence whose prompt ended in this step.
    """

    decoded: list[tuple[Sequence, SampledToken]]
    first: list[tuple[Sequence, list[SampledToken]]]


class LanguageRunner:
    """Turns a schedule into tensors. Holds no state of any request."""

    def __init__(
        self,
        model: LanguageModel,
        memory: KVMemory,
        device: Device,
        *,
        num_position_axes: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._model = model
        self._memory = memory
        self._ops = device.ops
        self._device = device.torch_device
        self._num_position_axes = num_position_axes
        self._eos_token_ids = eos_token_ids

    def step(
        self,
        output: ScheduleOutput,
        features_by_hash: Mapping[str, Tensor],
        on_layer: Callable[[int], None] | None = None,
    ) -> StepResult:
        """Compute the scheduled tokens.

        Args:
            features_by_hash: the features of all media that the chunks overlap.
            on_layer: called on this thread when a layer's KV is in the cache.
        """
        batch = _Batch(self._memory.layout.block_size)
        for sequence in output.decodes:
            batch.add_decode(sequence)
        for sequence, count in output.prefills:
            batch.add_prefill(sequence, count, features_by_hash)
        meta = batch.meta(self._device)
        context = StepContext(
            plan=self._ops.prepare(meta, self._model.dtype), kv=self._memory.tensor, on_layer=on_layer
        )
        features, feature_rows = batch.features(self._device)
        logits = self._model.forward(
            torch.tensor(batch.ids, device=self._device),
            batch.positions(self._num_position_axes).to(self._device),
            context,
            torch.tensor(batch.rows, dtype=torch.long, device=self._device),
            features,
            feature_rows,
        )
        return self._sample(logits, output)

    def _sample(self, logits: Tensor, output: ScheduleOutput) -> StepResult:
        rows = [Row(sequence, sequence.index) for sequence in output.decodes]
        finished = [s for s, count in output.prefills if s.num_computed + count == s.num_tokens]
        source = list(range(len(rows)))
        for i, sequence in enumerate(finished, start=len(rows)):
            rows += [Row(sequence, index) for index in range(sequence.num_sequences)]
            source += [i] * sequence.num_sequences
        if not rows:
            return StepResult([], [])
        if len(source) > len(logits):
            logits = logits[source]
        tokens = sample(logits, rows, self._ops, self._eos_token_ids)
        decoded = list(zip(output.decodes, tokens[: len(output.decodes)], strict=True))
        rest = iter(tokens[len(output.decodes) :])
        first = [(sequence, [next(rest) for _ in range(sequence.num_sequences)]) for sequence in finished]
        return StepResult(decoded, first)


class _Batch:
    """The packed tokens of one step: decodes first, then prefill chunks."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.ids: list[int] = []
        self.rows: list[int] = []
        self._slots: list[int] = []
        self._decode_positions: list[int] = []
        self._prompt_positions: list[Tensor] = []
        self._decodes: list[Sequence] = []
        self._prefills: list[tuple[Sequence, int]] = []
        self._features: list[Tensor] = []
        self._feature_rows: list[int] = []

    def add_decode(self, sequence: Sequence) -> None:
        index = sequence.num_tokens - 1
        self.rows.append(len(self.ids))
        self.ids.append(sequence.output_ids[-1])
        self._decode_positions.append(index + sequence.position_delta)
        self._add_slots(sequence, index, index + 1)
        self._decodes.append(sequence)

    def add_prefill(self, sequence: Sequence, count: int, features: Mapping[str, Tensor]) -> None:
        start, end = sequence.num_computed, sequence.num_computed + count
        first_row = len(self.ids) - start
        for span in sequence.spans:
            low, high = max(span.start, start), min(span.end, end)
            if low < high:
                self._features.append(features[span.mm_hash][low - span.start : high - span.start])
                self._feature_rows += range(first_row + low, first_row + high)
        self.ids += sequence.prompt_ids[start:end]
        self._prompt_positions.append(sequence.positions[:, start:end])
        self._add_slots(sequence, start, end)
        self._prefills.append((sequence, end))
        if end == sequence.num_tokens:
            self.rows.append(len(self.ids) - 1)

    def positions(self, num_axes: int) -> Tensor:
        """[axes, T]"""
        decodes = torch.tensor(self._decode_positions, dtype=torch.long).expand(num_axes, -1)
        return torch.cat([decodes, *self._prompt_positions], dim=1)

    def features(self, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """Features in batch order and the tokens that they replace."""
        if not self._features:
            return None, None
        return torch.cat(self._features).to(device), torch.tensor(self._feature_rows, device=device)

    def meta(self, device: torch.device) -> AttnMeta:
        context_lens = [sequence.num_tokens for sequence in self._decodes]
        return AttnMeta(
            block_size=self._block_size,
            slot_mapping=torch.tensor(self._slots, device=device),
            num_decodes=len(self._decodes),
            decode_block_table=self._table([(s, s.num_tokens) for s in self._decodes], device),
            decode_context_lens=torch.tensor(context_lens, dtype=torch.long, device=device),
            decode_context_lens_host=context_lens,
            prefill_query_lens=[end - s.num_computed for s, end in self._prefills],
            prefill_context_lens=[end for _, end in self._prefills],
            prefill_block_table=self._table(self._prefills, device),
        )

    def _table(self, entries: list[tuple[Sequence, int]], device: torch.device) -> Tensor:
        used = [sequence.blocks[: -(-tokens // self._block_size)] for sequence, tokens in entries]
        width = max(map(len, used), default=0)
        return torch.tensor(
            [row + [0] * (width - len(row)) for row in used], dtype=torch.long, device=device
        ).view(len(used), width)

    def _add_slots(self, sequence: Sequence, start: int, end: int) -> None:
        size = self._block_size
        self._slots += [sequence.blocks[i // size] * size + i % size for i in range(start, end)]
