"""One step: pack the scheduled tokens, let the language model compute them, sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice

import msgspec
import numpy as np
import torch
from torch import Tensor

from device.base import AttentionOps
from device.copies import Readback
from epd_serve.engine.computing import StepResult
from epd_serve.engine.decode_tables import DecodeTables, TableChange
from epd_serve.engine.followers import Followers
from epd_serve.engine.sampling.sampler import PromptLogprobs, Row, Sampler, Sampling
from epd_serve.engine.step import StepExecutor
from epd_serve.engine.step_inputs import StepInputs, on_device
from epd_serve.sched.schedule import ScheduleOutput
from epd_serve.sequence import PLACEHOLDER, Sequence


class LanguageRunner:
    """Turns a schedule into a step and its logits into tokens."""

    def __init__(
        self,
        executor: StepExecutor,
        ops: AttentionOps,
        *,
        block_size: int,
        num_position_axes: int,
        eos_token_ids: frozenset[int],
        followers: Followers | None = None,
    ) -> None:
        self._executor = executor
        self._sampler = Sampler(ops, eos_token_ids)
        self._block_size = block_size
        self._num_position_axes = num_position_axes
        self._followers = followers
        self._tables = DecodeTables(block_size, executor.num_seats)
        self._decoding = SampledRows([])

    def activate(self) -> None:
        """Make its device that of this thread, which is to launch steps."""
        self._executor.activate()

    def step(self, output: ScheduleOutput, features_by_hash: Mapping[str, Tensor]) -> StepResult:
        """Compute a step from its launch to its tokens."""
        step = self.launch(output, features_by_hash)
        step.sample()
        return step.read()

    def launch(
        self,
        output: ScheduleOutput,
        features_by_hash: Mapping[str, Tensor],
        on_layer: Callable[[int], None] | None = None,
        before: LaunchedStep | None = None,
    ) -> LaunchedStep:
        """Let the device compute the scheduled tokens; does not wait for it.

        Args:
            features_by_hash: the features of all media that the chunks overlap.
            on_layer: called on this thread when a layer's KV is in the cache.
            before: has chosen the tokens for which placeholders stand.
        """
        batch = _Batch(self._block_size, self._num_position_axes)
        batch.add_decodes(output.decodes, self._tables)
        for sequence, count in output.prefills:
            batch.add_prefill(sequence, count, features_by_hash)
        inputs = batch.inputs()
        fed = None
        if batch.fed:
            assert before is not None, "a step before has chosen the tokens"
            fed = before.tokens_of(list(batch.fed.values()))
        logprobs = PromptLogprobs(inputs, self._executor.device) if inputs.scored_rows else None
        with self._followers.together(inputs) if self._followers else nullcontext():
            logits = self._executor.compute(inputs, on_layer, fed, logprobs)
        finished = [s for s, count in output.prefills if s.num_computed + count == s.num_tokens]
        scored = None if logprobs is None else Scored(logprobs, batch.scored)
        if not finished and output.decodes != self._decoding.sequences:
            self._decoding = SampledRows(output.decodes)
        sampled = SampledRows([*output.decodes, *finished]) if finished else self._decoding
        return LaunchedStep(self._sampler, logits, sampled, scored)


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probabilities on their way to the host, and the tokens that they belong to: (sequence, index)."""

    logprobs: PromptLogprobs
    tokens: list[tuple[Sequence, int]]

    def hand_out(self) -> None:
        for (sequence, index), logprob in zip(self.tokens, self.logprobs.read(), strict=True):
            wanted = sequence.sampling.logprobs or 0
            sequence.logprobs[index] = msgspec.structs.replace(logprob, top=logprob.top[:wanted])


class SampledRows:
    """The sequences of a step that get tokens; the same ones as long as they decode.

    Attributes:
        rows: one for each token. by_row: the sequence of each.
        decoding: whether a sequence gets one token, and not its first ones.
    """

    def __init__(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences
        self.rows = [Row(s, index) for s in sequences for index in range(s.index, s.index + s.num_sampled)]
        self.by_row = [row.sequence for row in self.rows]
        self.decoding = [bool(sequence.output_ids) for sequence in sequences]


class LaunchedStep:
    """A step that the device computes: :meth:`sample`, then :meth:`read`."""

    def __init__(
        self, sampler: Sampler, logits: Tensor, sampled: SampledRows, scored: Scored | None = None
    ) -> None:
        self._scored = scored
        self._sampler = sampler
        self._logits = logits
        self._sampled = sampled
        self._sampling: Sampling | None = None
        self._computed: Readback | None = None

    def sample(self) -> None:
        """Let the device choose the tokens; those before them must be known."""
        if self._scored is not None:
            self._scored.logprobs.send()
        rows, sequences = self._sampled.rows, self._sampled.sequences
        if not rows:
            self._computed = Readback(self._logits)  # of no rows: its end is that of the step
            return
        logits = self._logits
        if len(rows) > len(sequences):
            place = {sequence: i for i, sequence in enumerate(sequences)}
            logits = logits[on_device(logits, [place[sequence] for sequence in self._sampled.by_row])]
        self._sampling = self._sampler.sample(logits, rows)

    def tokens_of(self, sequences: list[Sequence]) -> Tensor:
        """[len(sequences)] on the device, which may not have chosen them yet."""
        assert self._sampling is not None, "sample() comes first"
        tokens = self._sampling.tokens
        if sequences == self._sampled.by_row:
            return tokens
        places = {sequence: place for place, sequence in enumerate(self._sampled.by_row)}
        return tokens.index_select(0, on_device(tokens, [places[sequence] for sequence in sequences]))

    def read(self) -> StepResult:
        """Wait for the end of the step, and hand each sequence the log-probabilities of its known tokens."""
        if self._computed is not None:
            self._computed.wait()
        if self._scored is not None:
            self._scored.hand_out()
        tokens = iter([] if self._sampling is None else self._sampling.read())
        result = StepResult([], [])
        for sequence, is_decoding in zip(self._sampled.sequences, self._sampled.decoding, strict=True):
            if is_decoding:
                result.decoded.append((sequence, next(tokens)))
            else:
                result.first.append((sequence, list(islice(tokens, sequence.num_sequences))))
        return result


class _Batch:
    """The packed tokens of one step: decodes first, then prefill chunks."""

    def __init__(self, block_size: int, num_axes: int) -> None:
        self._block_size = block_size
        self.ids: list[int] = []
        self.fed: dict[int, Sequence] = {}  # rows whose tokens the host does not know
        self.rows: list[int] = []
        self._slots: list[int] = []
        self._positions = [torch.zeros(num_axes, 0, dtype=torch.long)]
        self._decodes: list[Sequence] = []
        self._decode_lens: list[int] = []
        self._change = TableChange()
        self._prefills: list[tuple[Sequence, int]] = []
        self._features: list[Tensor] = []
        self.scored: list[tuple[Sequence, int]] = []
        self._scored_rows: list[int] = []
        self._scored_ids: list[int] = []
        self._feature_rows: list[int] = []

    def add_decodes(self, decodes: list[Sequence], tables: DecodeTables) -> None:
        """The decodes of the step, before anything else."""
        self._decodes = decodes
        ids = [sequence.output_ids[-1] for sequence in decodes]
        self.fed = {row: decodes[row] for row, token in enumerate(ids) if token == PLACEHOLDER}
        self.ids = [0 if token == PLACEHOLDER else token for token in ids] if self.fed else ids
        self.rows = list(range(len(ids)))
        lens = self._decode_lens = [len(one.prompt_ids) + len(one.output_ids) for one in decodes]
        deltas = [one.position_delta for one in decodes]
        self._change = tables.change([one.blocks for one in decodes], lens, deltas)

    def add_prefill(self, sequence: Sequence, count: int, features: Mapping[str, Tensor]) -> None:
        start, end = sequence.num_computed, sequence.num_computed + count
        first_row = len(self.ids) - start
        for span in sequence.spans:
            low, high = max(span.start, start), min(span.end, end)
            if low < high:
                first = span.offset - span.start
                self._features.append(features[span.mm_hash][first + low : first + high])
                self._feature_rows += range(first_row + low, first_row + high)
        length = sequence.num_prompt_tokens
        self.ids += sequence.prompt_ids[start:end]
        self._positions.append(sequence.positions[:, start:end])
        if end > length:  # output that is computed again
            self.ids += sequence.output_ids[max(start - length, 0) : end - length]
            index = torch.arange(max(start, length), end) + sequence.position_delta
            self._positions.append(index.expand(len(sequence.positions), -1))
            self._mark_fed(sequence)
        tokens, first = np.arange(start, end), start // self._block_size
        own = np.array(sequence.blocks[first : -(-end // self._block_size)])
        slots = own[tokens // self._block_size - first] * self._block_size + tokens % self._block_size
        self._slots += slots.tolist()
        self._prefills.append((sequence, end))
        if end == sequence.num_tokens:
            self.rows.append(len(self.ids) - 1)
        wanted = sequence.wanted_logprobs
        for place in range(max(start + 1, wanted.start), min(end + 1, wanted.stop)):
            self.scored.append((sequence, place))
            self._scored_rows.append(first_row + place - 1)
            is_prompt = place < length
            self._scored_ids.append(
                sequence.prompt_ids[place] if is_prompt else sequence.output_ids[place - length]
            )

    def inputs(self) -> StepInputs:
        sequences = [*self._decodes, *(sequence for sequence, _ in self._prefills)]
        size = self._block_size
        return StepInputs(
            ids=self.ids,
            positions=torch.cat(self._positions, dim=1) if self._prefills else self._positions[0],
            slots=self._slots,
            rows=self.rows,
            decode_context_lens=self._decode_lens,
            decodes=self._change,
            prefill_query_lens=[end - sequence.num_computed for sequence, end in self._prefills],
            prefill_context_lens=[end for _, end in self._prefills],
            prefill_blocks=[sequence.blocks[: -(-end // size)] for sequence, end in self._prefills],
            features=torch.cat(self._features) if self._features else None,
            feature_rows=self._feature_rows,
            scored_rows=self._scored_rows,
            scored_ids=self._scored_ids,
            prefill_both_ways=[
                [span for span in sequence.both_ways if sequence.num_computed < span[1] and span[0] < end]
                for sequence, end in self._prefills
            ],
            num_top=max((s.sampling.logprobs or 0 for s, _ in self.scored), default=0),
            states=[one.state_blocks for one in sequences] if sequences and sequences[0].states else [],
            fed_rows=list(self.fed),
        )

    def _mark_fed(self, sequence: Sequence) -> None:
        if self.ids[-1] == PLACEHOLDER:
            self.ids[-1] = 0
            self.fed[len(self.ids) - 1] = sequence
