"""The block tables of the sequences that decode stay on each rank's device; a step brings what is new of them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import msgspec
import numpy as np
import torch
from torch import Tensor

from device.copies import to_device


class TableChange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The difference between the decodes of a step and those of the last step that had some.

    Attributes:
        writes: blocks that a table did not have: (seat, first column, blocks).
        seats: of each decode, in the order of the batch; None: they are the same, each a token further.
        position_deltas: numbers that M-RoPE adds to the index of a token of each; empty where they are the same.
    """

    writes: list[tuple[int, int, list[int]]] = []
    seats: list[int] | None = None
    position_deltas: list[int] = []


class DecodeTables:
    """The first rank's account of what the devices' tables hold.

    A sequence is known by its list of blocks, which only grows: one that comes back with another list is new.

    Args:
        num_seats: rows of the tables, at least as many as a step has decodes.
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
        """Take over a step's decodes; returns what the devices have to be told of them.

        Args:
            tables: the blocks of each, as many as its context fills at least.
        """
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
        """Keep the seats of those that go on, and give the others' to new ones."""
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
    """A rank's tables, and how far each decode of the batch is: a step makes its inputs of these on the device.

    Rows of a batch without a decode have the table of a seat that is nobody's: zeros, for block 0 belongs to no
    sequence. They see one token and write into block 0, each into a slot of its own as long as there are some: an
    NPU's write says nothing of slots that are written twice.
    """

    def __init__(self, device: torch.device, *, num_seats: int, max_blocks: int, block_size: int) -> None:
        self._device, self._block_size = device, block_size
        self._table = torch.zeros(num_seats + 1, max_blocks, dtype=torch.int32, device=device)
        nobody = np.array([[num_seats], [1], [0], [0]], np.int64)
        self._nobodies = np.repeat(nobody, num_seats, axis=1)
        # seat, context, position delta, tokens a step: [4, num_seats]
        self._batch = torch.from_numpy(self._nobodies).to(device, copy=True)
        self._spare_slots = torch.arange(num_seats, device=device) % block_size

    @property
    def max_blocks(self) -> int:
        return self._table.shape[1]

    def update(self, change: TableChange, context_lens: Sequence[int]) -> None:
        """Take over the change of a step, whose decodes have these contexts when it is over."""
        if change.writes:
            width = self.max_blocks
            ends = [start + len(blocks) for _, start, blocks in change.writes]
            assert max(ends) <= width, f"a context of {max(ends)} blocks, where a table has {width}"
            cells, new = list[int](), list[int]()
            for seat, start, blocks in change.writes:
                first = seat * width + start
                cells += range(first, first + len(blocks))
                new += blocks
            where, values = to_device(torch.tensor([cells, new]), self._device)
            self._table.view(-1).index_copy_(0, where, values.int())
        if change.seats is not None:
            batch, count = self._nobodies.copy(), len(change.seats)
            batch[0, :count], batch[2, :count], batch[3, :count] = change.seats, change.position_deltas, 1
            batch[1, :count] = context_lens
            batch[1, :count] -= 1
            self._batch.copy_(to_device(torch.from_numpy(batch), self._device))

    def next_slots(self, size: int) -> Tensor:
        """The slots [size] of the step that :meth:`advance` will begin."""
        return self._slots(self._batch[1, :size] + self._batch[3, :size] - 1)

    def advance(self, size: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Let each decode go a token further. Nothing of this waits for the host: a graph may begin with it.

        Args:
            size: rows of the batch. width: blocks of the longest context at least.

        Returns:
            Of the step: slots [size], positions [size], tables [size, width] int32, context lengths [size], which
            hold until the next step.
        """
        seats, context_lens, position_deltas, num_new = self._batch[:, :size]
        context_lens.add_(num_new)
        last = context_lens - 1
        return (
            self._slots(last),
            last + position_deltas,
            self._table[:, :width].index_select(0, seats),
            context_lens,
        )

    def _slots(self, last: Tensor) -> Tensor:
        """Of the tokens at these indices [size] of the sequences of the batch."""
        size = len(last)
        cells = self._batch[0, :size] * self.max_blocks + last // self._block_size
        slots = self._table.view(-1).index_select(0, cells).long() * self._block_size + last % self._block_size
        return torch.where(self._batch[3, :size] > 0, slots, self._spare_slots[:size])
