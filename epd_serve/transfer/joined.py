"""Pieces of memory that lie apart, under one name."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate


class JoinedMemory:
    """Buffers one after the other, so that one write reaches several. What is cut out of it lies in one of them.

    Raises ValueError for no buffers, and for an empty one.
    """

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        if not buffers or not all(buffer.nbytes for buffer in buffers):
            raise ValueError("joined memory needs buffers that are not empty")
        self._buffers = list(buffers)
        self._starts = [0, *accumulate(buffer.nbytes for buffer in buffers)]

    @property
    def nbytes(self) -> int:
        return self._starts[-1]

    def __getitem__(self, span: slice) -> memoryview:
        """The bytes from ``start`` up to ``stop``, or up to the end of the buffer that holds ``start``."""
        start, stop = int(span.start), int(span.stop)
        index = min(bisect_right(self._starts, start), len(self._buffers)) - 1
        base = self._starts[index]
        return self._buffers[index][start - base : stop - base]
