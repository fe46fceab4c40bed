"""Packed inputs of a step.

Block tables of decoding sequences stay on the device; a step sends only changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import is_

import numpy as np
import torch
from torch import Tensor

from device.copies import to_device
from epd_serve.sched.schedule import ScheduleOutput
from epd_serve.sched.sequence import PLACEHOLDER
from epd_serve.sched.sequence import Sequence as TokenSequence


@dataclass(frozen=True, slots=True)
class TableChange:
    """The difference between the decodes of a step and the last decodes.

    Attributes:
        writes: new blocks of tables: (seat, first column, blocks).
        seats: seat of each decode, in batch order; None: the same decodes, each one token later.
        position_deltas: M-RoPE's offset from token index to position, per decode; empty if unchanged.
    """

    writes: Sequence[tuple[int, int, list[int]]] = ()
    seats: list[int] | None = None
    position_deltas: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInputs:
    """Packed tokens of a step, on the host: decodes first, then prefill chunks.

    Attributes:
        positions: [axes, prefill tokens] int64; the device computes those of decodes.
        slots: [prefill tokens], cache slots of the tokens' K and V.
        rows: tokens with requested logits. scored_rows: tokens whose successors ``scored_ids`` need
            log-probabilities, with ``num_top`` alternatives. scored: these successors as (sequence, index).
        decodes: changes of the decodes' tables.
        prefill_blocks: blocks of each sequence that its context fills.
        prefill_both_ways: for each prefill, the runs of its sequence's tokens with bidirectional attention.
        features: [F, (1 + deepstack levels) * hidden], in batch order; None without media.
        feature_rows: [F], the tokens replaced by features.
        states: blocks of each sequence's recurrent state, decodes first; empty without recurrent states.
        fed_rows: tokens chosen by the previous step on the device and still unknown to the host. fed: their
            sequences.
    """

    ids: list[int]
    positions: Tensor
    slots: list[int]
    rows: list[int]
    decode_context_lens: list[int]
    decodes: TableChange
    prefill_query_lens: list[int]
    prefill_context_lens: list[int]
    prefill_blocks: list[list[int]]
    features: Tensor | None
    feature_rows: list[int]
    scored_rows: Sequence[int] = ()
    scored_ids: Sequence[int] = ()
    num_top: int = 0
    prefill_both_ways: Sequence[Sequence[tuple[int, int]]] = ()
    states: Sequence[list[int]] = ()
    fed_rows: Sequence[int] = ()
    scored: Sequence[tuple[TokenSequence, int]] = ()
    fed: Sequence[TokenSequence] = ()

    def feed(self, ids: Tensor, tokens: Tensor) -> None:
        """Put the ``tokens`` of ``fed_rows`` among the step's ``ids``, both on a device."""
        rows = self.fed_rows
        if rows[-1] == len(rows) - 1:  # consecutive from 0, as in a step of decodes
            ids[: len(rows)].copy_(tokens)
        else:
            ids.index_copy_(0, on_device(rows, ids.device), tokens)


class DecodeTables:
    """The host's view of the tables on the device: ``num_seats`` rows, one for each decode.

    A sequence is identified by its list of blocks, which only grows: with another list it counts as new.
    """

    def __init__(self, block_size: int, num_seats: int) -> None:
        self._block_size = block_size
        self._tables: list[list[int]] = []  # of the decodes of the last step
        self._index = np.zeros(0, np.int64)  # their seats
        self._lens = np.zeros(0, np.int64)  # their contexts
        self._seats: dict[int, int] = {}  # the same, by id() of the table
        self._free = list(range(num_seats))
        self._num_written = np.zeros(num_seats, np.int64)  # blocks, by seat

    def change(
        self, tables: list[list[int]], context_lens: Sequence[int], position_deltas: list[int]
    ) -> TableChange:
        """Record a step's decodes, each with blocks for its context; return the change for the device."""
        if not tables:
            return TableChange()
        is_same = len(tables) == len(self._tables) and all(map(is_, tables, self._tables))
        if not is_same:
            self._seat(tables)
        lens = np.array(context_lens, np.int64)
        goes_on = is_same and np.array_equal(lens, self._lens + 1)
        self._lens = lens
        num_blocks = -(-lens // self._block_size)
        writes = []
        for place in np.flatnonzero(num_blocks > self._num_written[self._index]).tolist():
            seat, end = int(self._index[place]), int(num_blocks[place])
            start = int(self._num_written[seat])
            writes.append((seat, start, tables[place][start:end]))
            self._num_written[seat] = end
        if goes_on:
            return TableChange(writes)
        return TableChange(writes, self._index.tolist(), position_deltas)

    def _seat(self, tables: list[list[int]]) -> None:
        """Keep the seats of continuing decodes, and assign the others to new ones."""
        kept = {id(table) for table in tables}
        for table in self._tables:
            if id(table) not in kept:
                self._free.append(self._seats.pop(id(table)))
        for table in tables:
            if id(table) not in self._seats:
                seat = self._seats[id(table)] = self._free.pop()
                self._num_written[seat] = 0
        self._tables = tables
        self._index = np.array([self._seats[id(table)] for table in tables], np.int64)


class DeviceTables:
    """The tables on the device and the progress of each decode, from which a step computes its inputs there.

    Padding rows of a batch use the table of a reserved seat: zeros, because block 0 is reserved for padding. They
    see one token and write into distinct slots of block 0 while slots last, because an NPU's write is undefined
    for repeated slots.
    """

    def __init__(self, device: torch.device, *, num_seats: int, max_blocks: int, block_size: int) -> None:
        self._device, self._block_size, self.max_blocks = device, block_size, max_blocks
        self._table = torch.zeros(num_seats + 1, max_blocks, dtype=torch.int32, device=device)
        padding = np.array([[num_seats], [1], [0], [0]], np.int64)
        self._padding = np.repeat(padding, num_seats, axis=1)
        # seat, context, position delta, tokens a step: [4, num_seats]
        self._batch = torch.from_numpy(self._padding).to(device, copy=True)
        self._spare_slots = torch.arange(num_seats, device=device) % block_size

    def update(self, change: TableChange, context_lens: Sequence[int]) -> None:
        """Apply a step's change; ``context_lens``: contexts of its decodes after the step."""
        if change.writes:
            width = self.max_blocks
            ends = [start + len(blocks) for _, start, blocks in change.writes]
            assert max(ends) <= width, f"a context of {max(ends)} blocks in a table of {width}"
            cells, new = list[int](), list[int]()
            for seat, start, blocks in change.writes:
                first = seat * width + start
                cells += range(first, first + len(blocks))
                new += blocks
            where, values = to_device(torch.tensor([cells, new]), self._device)
            self._table.view(-1).index_copy_(0, where, values.int())
        if change.seats is not None:
            batch, count = self._padding.copy(), len(change.seats)
            batch[0, :count], batch[2, :count], batch[3, :count] = change.seats, change.position_deltas, 1
            batch[1, :count] = context_lens
            batch[1, :count] -= 1
            self._batch.copy_(to_device(torch.from_numpy(batch), self._device))

    def advance(self, size: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Advance each decode by one token, without the host, so that a graph may begin with it.

        Returns:
            Slots [size], positions [size], tables [size, width] int32, context lengths [size], valid until the
            next step.
        """
        seats, context_lens, position_deltas, num_new = self._batch[:, :size]
        context_lens.add_(num_new)
        last = context_lens - 1
        cells = seats * self.max_blocks + last // self._block_size
        slots = self._table.view(-1).index_select(0, cells).long() * self._block_size + last % self._block_size
        slots = torch.where(num_new > 0, slots, self._spare_slots[:size])
        return slots, last + position_deltas, self._table[:, :width].index_select(0, seats), context_lens


def pack_step(
    output: ScheduleOutput,
    tables: DecodeTables,
    features: Mapping[str, Tensor],
    *,
    block_size: int,
    num_axes: int,
) -> StepInputs:
    """Pack the tokens of a step, decodes first, and update ``tables``."""
    decodes, chunks = output.decodes, output.prefills
    ids = [sequence.output_ids[-1] for sequence in decodes]
    fed = {row: decodes[row] for row, token in enumerate(ids) if token == PLACEHOLDER}
    lens = [len(one.prompt_ids) + len(one.output_ids) for one in decodes]
    change = tables.change([one.blocks for one in decodes], lens, [one.position_delta for one in decodes])
    rows, slots, feature_rows = list(range(len(ids))), list[int](), list[int]()
    positions, taken = list[Tensor](), list[Tensor]()
    scored, scored_rows, scored_ids = list[tuple[TokenSequence, int]](), list[int](), list[int]()
    for sequence, count in chunks:
        start, end = sequence.num_computed, sequence.num_computed + count
        length, first_row = len(sequence.prompt_ids), len(ids) - start
        for span in sequence.spans:
            low, high = max(span.start, start), min(span.end, end)
            if low < high:
                first = span.offset - span.start
                taken.append(features[span.mm_hash][first + low : first + high])
                feature_rows += range(first_row + low, first_row + high)
        ids += sequence.prompt_ids[start:end]
        positions.append(sequence.positions[:, start:end])
        if end > length:  # recomputed output
            ids += sequence.output_ids[max(start - length, 0) : end - length]
            index = torch.arange(max(start, length), end) + sequence.position_delta
            positions.append(index.expand(len(sequence.positions), -1))
            if ids[-1] == PLACEHOLDER:
                fed[len(ids) - 1] = sequence
        tokens, first = np.arange(start, end), start // block_size
        own = np.array(sequence.blocks[first : -(-end // block_size)])
        slots += (own[tokens // block_size - first] * block_size + tokens % block_size).tolist()
        if end == sequence.num_tokens:
            rows.append(len(ids) - 1)
        wanted = sequence.wanted_logprobs
        for place in range(max(start + 1, wanted.start), min(end + 1, wanted.stop)):
            is_prompt = place < length
            scored.append((sequence, place))
            scored_rows.append(first_row + place - 1)
            scored_ids.append(sequence.prompt_ids[place] if is_prompt else sequence.output_ids[place - length])
    for row in fed:
        ids[row] = 0
    ends = [(sequence, sequence.num_computed + count) for sequence, count in chunks]
    has_states = any(one.states for one in output.sequences[:1])
    return StepInputs(
        ids=ids,
        positions=torch.cat(positions, dim=1) if positions else torch.zeros(num_axes, 0, dtype=torch.long),
        slots=slots,
        rows=rows,
        decode_context_lens=lens,
        decodes=change,
        prefill_query_lens=[count for _, count in chunks],
        prefill_context_lens=[end for _, end in ends],
        prefill_blocks=[sequence.blocks[: -(-end // block_size)] for sequence, end in ends],
        features=torch.cat(taken) if taken else None,
        feature_rows=feature_rows,
        scored_rows=scored_rows,
        scored_ids=scored_ids,
        num_top=max((one.sampling.logprobs or 0 for one, _ in scored), default=0),
        prefill_both_ways=[
            [span for span in one.both_ways if one.num_computed < span[1] and span[0] < end] for one, end in ends
        ],
        states=[one.states[0] for one in output.sequences] if has_states else [],
        fed_rows=list(fed),
        scored=scored,
        fed=list(fed.values()),
    )


def on_device(
    values: Sequence[int] | Sequence[float], device: torch.device, dtype: torch.dtype = torch.long
) -> Tensor:
    return to_device(torch.tensor(values, dtype=dtype), device)
