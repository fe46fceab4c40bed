"""Variable-size pieces of one slab: best fit, neighbours merged when freed."""

from __future__ import annotations

from bisect import bisect_left, insort


class SlabAllocator:
    """Hands out aligned, non-overlapping ``[offset, offset + nbytes)`` ranges of ``capacity`` bytes.

    ``capacity`` is rounded down to the alignment, so that whatever is no larger fits when all else is free.
    """

    def __init__(self, capacity: int, alignment: int = 64) -> None:
        self.capacity = capacity // alignment * alignment
        self._alignment = alignment
        self._free_by_offset: dict[int, int] = {0: self.capacity}
        self._offsets = [0]
        self._used: dict[int, int] = {}

    def allocate(self, nbytes: int) -> int | None:
        """Offset of a free range of at least ``nbytes``; None where no single hole is large enough."""
        size = -(-max(nbytes, 1) // self._alignment) * self._alignment
        holes = [(hole, offset) for offset, hole in self._free_by_offset.items() if hole >= size]
        if not holes:
            return None
        hole, offset = min(holes)
        self._remove_hole(offset)
        if hole > size:
            self._add_hole(offset + size, hole - size)
        self._used[offset] = size
        return offset

    def free(self, offset: int) -> None:
        size = self._used.pop(offset)
        index = bisect_left(self._offsets, offset)
        if index < len(self._offsets) and self._offsets[index] == offset + size:
            size += self._remove_hole(offset + size)
        if index > 0:
            before = self._offsets[index - 1]
            if before + self._free_by_offset[before] == offset:
                size += self._remove_hole(before)
                offset = before
        self._add_hole(offset, size)

    def check_integrity(self) -> None:
        """Raise AssertionError unless used ranges and merged holes tile the slab exactly."""
        ranges = sorted([*self._used.items(), *self._free_by_offset.items()])
        position = 0
        for offset, size in ranges:
            assert offset == position, f"gap or overlap at {position}"
            position = offset + size
        assert position == self.capacity, "the slab is not covered"
        assert sorted(self._free_by_offset) == self._offsets, "the index of holes is stale"
        for left, right in zip(self._offsets, self._offsets[1:], strict=False):
            assert left + self._free_by_offset[left] < right, "neighbouring holes were not merged"

    def _add_hole(self, offset: int, size: int) -> None:
        self._free_by_offset[offset] = size
        insort(self._offsets, offset)

    def _remove_hole(self, offset: int) -> int:
        del self._offsets[bisect_left(self._offsets, offset)]
        return self._free_by_offset.pop(offset)
