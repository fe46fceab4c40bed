"""Pieces of a slab never overlap, and a freed slab is one hole again."""

from hypothesis import given
from hypothesis import strategies as st

from epd_serve.transfer.shared_memory import SlabAllocator


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 700)), max_size=60))
def test_ranges_tile_the_slab(steps: list[tuple[bool, int]]) -> None:
    allocator = SlabAllocator(4096, alignment=64)
    live: dict[int, int] = {}
    for allocate, size in steps:
        if allocate:
            offset = allocator.allocate(size)
            if offset is not None:
                assert offset % 64 == 0
                assert all(offset + size <= o or o + s <= offset for o, s in live.items())
                live[offset] = size
        elif live:
            offset = sorted(live)[size % len(live)]
            del live[offset]
            allocator.free(offset)
        allocator.check_integrity()
    for offset in live:
        allocator.free(offset)
    allocator.check_integrity()
    assert allocator.allocate(4096) == 0
