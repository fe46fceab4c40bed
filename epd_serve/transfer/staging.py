"""The bounded host memory through which an accelerator's KV goes to other instances and comes from them.

It is made of cells; a cell holds K and V of one block in one layer::

    |<--------- leaving: 4 rounds --------->|<----- arriving: 3 rounds ---->|<- saved: 1 ->|
    | t7 of layers 0-3 | t9 of 0-1 |  free  | t3 of layers 4-7 |    free    | engine's own |

What leaves lies here until the other side has it, what arrives only until it is on the device: as the two never
wait for each other's cells, instances that send to each other cannot block. More than a round goes in rounds.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from epd_serve.transfer.shared_memory import SlabAllocator
from epd_serve.transfer.transport import StillCopying, TransferError

#: ``nbytes`` from ``offset`` on.
Span = tuple[int, int]

_LEAVING, _ARRIVING, _SAVED = 4, 3, 1
_ROUNDS = _LEAVING + _ARRIVING + _SAVED


class CellLender:
    """Lends runs of cells to threads, in the order in which they ask. Safe from any thread.

    Args:
        quarantine_s: for which cells are kept that something may still be copied to.
    """

    def __init__(
        self, first: int, count: int, quarantine_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._first = first
        self._free = SlabAllocator(count, alignment=1)
        self._quarantine_s = quarantine_s
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._num_lent = 0
        self._quarantined: deque[tuple[float, int]] = deque()  # (until, first cell), the oldest first

    @property
    def num_lent(self) -> int:
        """Runs that are lent or in quarantine."""
        with self._changed:
            self._reclaim()
            return self._num_lent + len(self._quarantined)

    @contextmanager
    def lend(self, count: int) -> Iterator[int]:
        """Wait for ``count`` cells in a row; yield the first. Who has some must not ask for more."""
        assert 0 < count <= self._free.capacity, f"{count} of {self._free.capacity} cells asked for"
        start = self._take(count)
        may_change = False
        try:
            yield self._first + start
        except StillCopying:
            may_change = True
            raise
        finally:
            with self._changed:
                self._num_lent -= 1
                if may_change:
                    self._quarantined.append((self._clock() + self._quarantine_s, start))
                else:
                    self._free.free(start)
                self._changed.notify_all()

    def check_integrity(self) -> None:
        """Raise AssertionError unless each cell is lent once or free."""
        with self._changed:
            self._free.check_integrity()
            assert self._free.num_used == self._num_lent + len(self._quarantined), "cells are lost"

    def _take(self, count: int) -> int:
        turn = object()
        with self._changed:
            self._waiting.append(turn)
            while self._waiting[0] is not turn or (start := self._free.allocate(count)) is None:
                self._changed.wait(self._reclaim())
            self._waiting.popleft()
            self._num_lent += 1
            self._changed.notify_all()
            return start

    def _reclaim(self) -> float | None:
        """Take back what has been in quarantine for long enough; the seconds until the next has."""
        now = self._clock()
        while self._quarantined and self._quarantined[0][0] <= now:
            self._free.free(self._quarantined.popleft()[1])
            self._changed.notify_all()
        return self._quarantined[0][0] - now if self._quarantined else None


class StagingArea:
    """The cells of an instance.

    Args:
        num_cells: at most; fewer where all KV has fewer.
        kv_cells: of all blocks in all layers.
        quarantine_s: as for the lenders.

    Attributes:
        round_cells: the most that are moved at once.
        saved: the first of the cells for KV that is saved in host memory, one round of the engine's thread.
    """

    def __init__(self, num_cells: int, kv_cells: int, quarantine_s: float) -> None:
        self.round_cells = max(min(num_cells, kv_cells) // _ROUNDS, 1)
        self.num_cells = self.round_cells * _ROUNDS
        self.saved = self.round_cells * (_LEAVING + _ARRIVING)
        self.leaving = CellLender(0, self.round_cells * _LEAVING, quarantine_s)
        self.arriving = CellLender(self.round_cells * _LEAVING, self.round_cells * _ARRIVING, quarantine_s)

    @property
    def num_lent(self) -> int:
        return self.leaving.num_lent + self.arriving.num_lent

    def check_integrity(self) -> None:
        self.leaving.check_integrity()
        self.arriving.check_integrity()


def rounds(layers: range, num_blocks: int, most_cells: int | None) -> Iterator[tuple[range, range]]:
    """Cut blocks of some layers into parts of at most ``most_cells``: (layers, numbers of the blocks)."""
    most = len(layers) * num_blocks if most_cells is None else most_cells
    num_layers = max(most // max(num_blocks, 1), 1)
    for first_layer in range(layers.start, layers.stop, num_layers):
        part = range(first_layer, min(first_layer + num_layers, layers.stop))
        for first in range(0, num_blocks, max(most, 1)):
            yield part, range(first, min(first + most, num_blocks))


def slab_spans(
    layers: range,
    blocks: Sequence[int],
    num_blocks: int,
    size: int,
    *,
    start: int = 0,
    first_layer: int = 0,
    planes: int = 2,
) -> list[Span]:
    """The places of blocks in memory [layers, planes, num_blocks] of ``size`` bytes each; neighbours are one span.

    Args:
        start: of that memory, in bytes. first_layer: the layer with which it begins.
    """
    runs: list[list[int]] = []
    for block in blocks:
        if runs and block == runs[-1][0] + runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([block, 1])
    spans: list[Span] = []
    for plane in range(planes * (layers.start - first_layer), planes * (layers.stop - first_layer)):
        for block, count in runs:
            offset = start + (plane * num_blocks + block) * size
            if spans and sum(spans[-1]) == offset:
                spans[-1] = (spans[-1][0], spans[-1][1] + count * size)
            else:
                spans.append((offset, count * size))
    return spans


def paired(some: Sequence[Span], others: Sequence[Span]) -> list[tuple[int, int, int]]:
    """Lay two lists of spans of the same bytes side by side: (offset in one, offset in the other, bytes).

    Raises TransferError where they differ in length.
    """
    if sum(nbytes for _, nbytes in some) != sum(nbytes for _, nbytes in others):
        raise TransferError("the places of the KV here and there are not of one size")
    pairs: list[tuple[int, int, int]] = []
    ahead = deque(others)
    for here, left in some:
        while left:
            there, nbytes = ahead.popleft()
            count = min(left, nbytes)
            pairs.append((here, there, count))
            here, left = here + count, left - count
            if count < nbytes:
                ahead.appendleft((there + count, nbytes - count))
    return pairs
