"""The bounded host memory that stages an accelerator's KV on its way to and from other instances.

A cell holds K and V of one block in one layer::

    |<--------- leaving: 4 rounds --------->|<----- arriving: 3 rounds ---->|<- saved: 1 ->|
    | t7 of layers 0-3 | t9 of 0-1 |  free  | t3 of layers 4-7 |    free    | engine's own |

Outgoing KV stays until the peer has read it, incoming KV until it is on the device. They use separate cells, so
two instances that send to each other cannot deadlock. Larger transfers take several rounds.
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
    """Lends runs of cells to threads, first come, first served. Safe from any thread.

    Args:
        first, count: the range of cells.
        quarantine_s: how long to hold back cells after StillCopying.
        alignment: alignment of runs, in cells.
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
        self._quarantined: deque[tuple[float, int]] = deque()  # (until, first cell), oldest first

    @property
    def num_lent(self) -> int:
        """Runs lent or in quarantine."""
        with self._changed:
            self._reclaim()
            return self._num_lent + len(self._quarantined)

    @contextmanager
    def lend(self, count: int, timeout_s: float = math.inf) -> Iterator[int]:
        """Wait for ``count`` adjacent cells and yield the first; a thread must not wait while it holds others.

        Raises TransferError after ``timeout_s``.
        """
        assert 0 < count <= self._free.capacity, f"{count} cells requested of {self._free.capacity}"
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
        """Raise AssertionError unless each cell is either free or lent once."""
        with self._changed:
            self._free.check_integrity()
            assert len(self._free.used) == self._num_lent + len(self._quarantined), "cells are lost"

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
                        raise TransferError(f"no {count} staging cells became free within {timeout_s:g} s")
                    self._changed.wait(None if next_s == math.inf else next_s - now)
            finally:
                self._waiting.remove(turn)
                self._changed.notify_all()
            self._num_lent += 1
            return start

    def _reclaim(self) -> float:
        """Free the runs whose quarantine has ended; return when the next one ends."""
        while self._quarantined and self._quarantined[0][0] <= self._clock():
            self._free.free(self._quarantined.popleft()[1])
            self._changed.notify_all()
        return self._quarantined[0][0] if self._quarantined else math.inf


class StagingArea:
    """The staging cells of an instance: at most ``num_cells``, and as many as the KV cache has.

    Attributes:
        round_cells: cells moved at once at most.
        saved: first cell of the round that the engine's thread uses to save KV in host memory.
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


def rounds(layers: range, num_blocks: int, most_cells: int) -> Iterator[tuple[range, range]]:
    """Cut layers × blocks into parts of at most ``most_cells`` cells: (layers, indices of blocks)."""
    num_layers = max(most_cells // max(num_blocks, 1), 1)
    for first_layer in range(layers.start, layers.stop, num_layers):
        part = range(first_layer, min(first_layer + num_layers, layers.stop))
        for first in range(0, num_blocks, most_cells):
            yield part, range(first, min(first + most_cells, num_blocks))
