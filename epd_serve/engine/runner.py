"""One step: pack the scheduled tokens, let the language model compute them, sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from device.base import AttentionOps
from device.copies import Readback
from epd_serve.engine.computing import StepResult
from epd_serve.engine.followers import Followers
from epd_serve.engine.sampling.sampler import PromptLogprobs, Row, Sampler, Sampling
from epd_serve.engine.step import StepExecutor
from epd_serve.engine.step_inputs import StepInputs, TableChange, on_device
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
        self._tables = DecodeTables(block_size)

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
        batch = _Batch(self._block_size)
        batch.add_decodes(output.decodes, self._tables, self._num_position_axes)
        for sequence, count in output.prefills:
            batch.add_prefill(sequence, count, features_by_hash)
        inputs = batch.inputs()
        fed = None
        if batch.fed:
            assert before is not None, "a step before has chosen the tokens"
            fed = before.tokens_of(list(batch.fed.values()))
        logprobs = PromptLogprobs(inputs, self._executor.device) if inputs.scored_rows else None
        with self._followers.together(self._tables.change(inputs)) if self._followers else nullcontext():
            logits = self._executor.compute(inputs, on_layer, fed, logprobs)
        finished = [s for s, count in output.prefills if s.num_computed + count == s.num_tokens]
        scored = None if logprobs is None else Scored(logprobs, batch.scored)
        return LaunchedStep(self._sampler, logits, [*output.decodes, *finished], scored)


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probabilities on their way to the host, and the tokens that they belong to: (sequence, index)."""

    logprobs: PromptLogprobs
    tokens: list[tuple[Sequence, int]]

    def hand_out(self) -> None:
        for (sequence, index), logprob in zip(self.tokens, self.logprobs.read(), strict=True):
            wanted = sequence.sampling.logprobs or 0
            sequence.logprobs[index] = msgspec.structs.replace(logprob, top=logprob.top[:wanted])


class LaunchedStep:
    """A step that the device computes: :meth:`sample`, then :meth:`read`."""

    def __init__(
        self, sampler: Sampler, logits: Tensor, sampled: list[Sequence], scored: Scored | None = None
    ) -> None:
        self._scored = scored
        self._sampler = sampler
        self._logits = logits
        self._decoding = [bool(sequence.output_ids) for sequence in sampled]
        self._sampled = sampled
        self._rows = [Row(s, index) for s in sampled for index in range(s.index, s.index + s.num_sampled)]
        self._places = {row.sequence: place for place, row in enumerate(self._rows)}
        self._sampling: Sampling | None = None
        self._computed: Readback | None = None

    def sample(self) -> None:
        """Let the device choose the tokens; those before them must be known."""
        if self._scored is not None:
            self._scored.logprobs.send()
        if not self._rows:
            self._computed = Readback(self._logits)  # of no rows: its end is that of the step
            return
        logits = self._logits
        if len(self._rows) > len(self._sampled):
            place = {sequence: i for i, sequence in enumerate(self._sampled)}
            logits = logits[on_device(logits, [place[row.sequence] for row in self._rows])]
        self._sampling = self._sampler.sample(logits, self._rows)

    def tokens_of(self, sequences: list[Sequence]) -> Tensor:
        """[len(sequences)] on the device, which may not have chosen them yet."""
        assert self._sampling is not None, "sample() comes first"
        tokens = self._sampling.tokens
        return tokens.index_select(0, on_device(tokens, [self._places[sequence] for sequence in sequences]))

    def read(self) -> StepResult:
        """Wait for the end of the step, and hand each sequence the log-probabilities of its known tokens."""
        if self._computed is not None:
            self._computed.wait()
        if self._scored is not None:
            self._scored.hand_out()
        tokens = iter([] if self._sampling is None else self._sampling.read())
        result = StepResult([], [])
        for sequence, is_decoding in zip(self._sampled, self._decoding, strict=True):
            if is_decoding:
                result.decoded.append((sequence, next(tokens)))
            else:
                result.first.append((sequence, list(islice(tokens, sequence.num_sequences))))
        return result


class DecodeTables:
    """The block tables of the sequences of the last step that decode; what is new of each is written alone."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._table = np.zeros((0, 0), np.int64)
        self._decodes: list[Sequence] = []
        self._places: dict[Sequence, int] = {}  # rows of the table
        self._index = np.zeros(0, np.int64)  # the same, in the order of the decodes
        self._written: list[tuple[list[int], int]] = []  # by row: a list of blocks that only grows, how much of it
        self._writes: list[tuple[int, int, list[int]]] = []  # since the last step

    def blocks_of(self, decodes: list[Sequence], lens: list[int]) -> npt.NDArray[np.int64]:
        """[decodes, widest]: the blocks that the first ``lens`` tokens of each are in, then 0."""
        if decodes is not self._decodes:
            self._seat(decodes)
        size, self._writes = self._block_size, []
        width = -(-max(lens, default=0) // size)
        if width > self._table.shape[1]:
            self._table = np.pad(self._table, ((0, 0), (0, 2 * width - self._table.shape[1])))
        written = self._written
        for row, sequence, length in zip(self._index.tolist(), decodes, lens, strict=True):
            blocks, count = written[row]
            if blocks is not sequence.blocks or (length + size - 1) // size != count:
                self._write(row, sequence.blocks, (length + size - 1) // size)
        return np.ascontiguousarray(self._table[self._index, :width])

    def _write(self, row: int, blocks: list[int], count: int) -> None:
        known, start = self._written[row]
        if known is not blocks or start > count:
            start = 0
            self._table[row] = 0
        self._table[row, start:count] = blocks[start:count]
        self._written[row] = blocks, count
        self._writes.append((row, start, blocks[start:count]))

    def change(self, inputs: StepInputs) -> StepInputs:
        """The inputs of the step that was asked for last, as :class:`FollowedTables` of other ranks read them.

        Features go from device to device: see :meth:`~epd_serve.engine.step.StepExecutor.compute`.
        """
        change = TableChange(inputs.decode_blocks.shape[1], self._index.tolist(), self._writes)
        features = None if inputs.features is None else torch.empty_like(inputs.features, device="meta")
        table = torch.zeros(0, 0, dtype=torch.long)
        return msgspec.structs.replace(inputs, decode_blocks=table, tables=change, features=features)

    def _seat(self, decodes: list[Sequence]) -> None:
        """Keep the rows of those that go on, and give the others' to new ones."""
        staying = set(decodes)
        self._places = {sequence: row for sequence, row in self._places.items() if sequence in staying}
        more = len(decodes) - len(self._table)
        if more > 0:
            self._table = np.pad(self._table, ((0, more), (0, 0)))
            self._written += [([], 0)] * more
        taken = set(self._places.values())
        free = [row for row in range(len(self._table)) if row not in taken]
        for sequence in decodes:
            if sequence not in self._places:
                self._places[sequence] = free.pop()
        self._decodes = decodes
        self._index = np.array([self._places[sequence] for sequence in decodes], np.int64)


class FollowedTables:
    """The block tables that another rank writes, by its changes."""

    def __init__(self) -> None:
        self._table = np.zeros((0, 0), np.int64)

    def whole(self, inputs: StepInputs) -> StepInputs:
        """Return the inputs with their tables."""
        change = inputs.tables
        assert change is not None, "a step from another rank"
        height = max([row + 1 for row, _, _ in change.writes], default=0)
        missing = (max(height - self._table.shape[0], 0), max(change.width - self._table.shape[1], 0))
        if any(missing):
            self._table = np.pad(self._table, [(0, 2 * more) for more in missing])
        for row, start, blocks in change.writes:
            if start == 0:
                self._table[row] = 0
            self._table[row, start : start + len(blocks)] = blocks
        table = np.ascontiguousarray(self._table[np.array(change.rows, np.int64), : change.width])
        return msgspec.structs.replace(inputs, decode_blocks=torch.from_numpy(table), tables=None)


class _Batch:
    """The packed tokens of one step: decodes first, then prefill chunks."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.ids: list[int] = []
        self.fed: dict[int, Sequence] = {}  # rows whose tokens the host does not know
        self.rows: list[int] = []
        self._slots: list[int] = []
        self._positions: list[Tensor] = []
        self._decodes: list[Sequence] = []
        self._decode_lens: list[int] = []
        self._decode_blocks = torch.zeros(0, 0, dtype=torch.long)
        self._prefills: list[tuple[Sequence, int]] = []
        self._features: list[Tensor] = []
        self.scored: list[tuple[Sequence, int]] = []
        self._scored_rows: list[int] = []
        self._scored_ids: list[int] = []
        self._feature_rows: list[int] = []

    def add_decodes(self, decodes: list[Sequence], tables: DecodeTables, num_axes: int) -> None:
        """The decodes of the step, before anything else."""
        self._decodes = decodes
        ids = [sequence.output_ids[-1] for sequence in decodes]
        self.fed = {row: decodes[row] for row, token in enumerate(ids) if token == PLACEHOLDER}
        self.ids = [0 if token == PLACEHOLDER else token for token in ids] if self.fed else ids
        self.rows = list(range(len(ids)))
        lens = self._decode_lens = [len(one.prompt_ids) + len(one.output_ids) for one in decodes]
        last = np.array(lens, np.int64) - 1
        blocks = tables.blocks_of(decodes, lens)
        if len(lens):
            self._slots = (
                blocks[np.arange(len(lens)), last // self._block_size] * self._block_size + last % self._block_size
            ).tolist()
        positions = last + np.array([sequence.position_delta for sequence in decodes], np.int64)
        self._positions.append(torch.from_numpy(positions).expand(num_axes, -1))
        self._decode_blocks = torch.from_numpy(blocks)

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
        size = self._block_size
        self._slots += [sequence.blocks[i // size] * size + i % size for i in range(start, end)]
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
            positions=torch.cat(self._positions, dim=1),
            slots=self._slots,
            rows=self.rows,
            decode_context_lens=self._decode_lens,
            decode_blocks=self._decode_blocks,
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
