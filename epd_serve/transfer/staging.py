"""The bounded host memory through which an accelerator's KV goes to other instances and comes from them.

It is made of cells; a cell holds K and V of one block in one layer::

    |<--------- leaving: 4 rounds --------->|<----- arriving: 3 rounds ---->|<- saved: 1 ->|
    | t7 of layers 0-3 | t9 of 0-1 |  free  | t3 of layers 4-7 |    free    | engine's own |

What leaves lies here until the other side has it, what arrives only until it is on the device: as the two never
wait for each other's cells, instances that send to each other cannot block. More than a round goes in rounds.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from epd_serve.transfer.shared_memory import SlabAllocator
from epd_serve.transfer.transport import StillCopying, TransferError

_LEAVING, _ARRIVING, _SAVED = 4, 3, 1
_ROUNDS = _LEAVING + _ARRIVING + _SAVED


class CellLender:
    """Lends runs of cells to threads, in the order in which they ask. Safe from any thread.

    Args:
        first, count: the cells. alignment: of runs, in cells.
        quarantine_s: for which cells are kept that something may still be copied to.
    """

    def __init__(
        self,
        first: int,
        count: int,
        quarantine_s: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        alignment: int = 1,
    ) -> None:
        self._first = first
        self._free = SlabAllocator(count, alignment)
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
    def lend(self, count: int, timeout_s: float = math.inf) -> Iterator[int]:
        """Wait for ``count`` cells in a row; yield the first. Who has some must not wait for more.

        Raises TransferError where there are none within ``timeout_s``.
        """
        assert 0 < count <= self._free.capacity, f"{count} of {self._free.capacity} cells asked for"
        start = self._take(count, timeout_s)
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

    def _take(self, count: int, timeout_s: float) -> int:
        turn, until = object(), self._clock() + timeout_s
        with self._changed:
            self._waiting.append(turn)
            try:
                while True:
                    kept_until = self._reclaim()
                    if self._waiting[0] is turn and (start := self._free.allocate(count)) is not None:
                        break
                    now, next_s = self._clock(), min(kept_until, until)
                    if until <= now:
                        raise TransferError(f"no room for {count} in the staging memory within {timeout_s:g} s")
                    self._changed.wait(None if next_s == math.inf else next_s - now)
            finally:
                self._waiting.remove(turn)
                self._changed.notify_all()
            self._num_lent += 1
            return start

    def _reclaim(self) -> float:
        """Take back what has been in quarantine for long enough; the time at which the next has."""
        while self._quarantined and self._quarantined[0][0] <= self._clock():
            self._free.free(self._quarantined.popleft()[1])
            self._changed.notify_all()
        return self._quarantined[0][0] if self._quarantined else math.inf


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
