"""The cells through which KV passes: none is lent twice, all come back, and whoever waits gets his turn."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epd_serve.transfer.shared_memory import SlabAllocator
from epd_serve.transfer.staging import CellLender, StagingArea, rounds
from epd_serve.transfer.transport import StillCopying, TransferError

FIRST, COUNT, QUARANTINE_S = 5, 12, 3.0


class Borrower:
    """A thread that asks for cells and keeps them until it is told how to end."""

    def __init__(self, lender: CellLender, count: int) -> None:
        self.count, self.first = count, -1
        self.granted, self._end = threading.Event(), threading.Event()
        self._error: Exception | None = None
        self.thread = threading.Thread(target=self._run, args=(lender,), daemon=True)
        self.thread.start()

    def _run(self, lender: CellLender) -> None:
        try:
            with lender.lend(self.count) as self.first:
                self.granted.set()
                self._end.wait(60)
                if self._error is not None:
                    raise self._error
        except TransferError:
            pass

    def end(self, error: Exception | None = None) -> None:
        self._error = error
        self._end.set()
        self.thread.join(60)

    @property
    def cells(self) -> set[int]:
        return set(range(self.first, self.first + self.count))


class LenderMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.lender = CellLender(FIRST, COUNT, QUARANTINE_S, lambda: self.now)
        self.asked: list[Borrower] = []  # and not ended, in the order in which they asked
        self.kept: list[tuple[float, set[int]]] = []

    @property
    def held(self) -> list[Borrower]:
        return [one for one in self.asked if one.granted.is_set()]

    @precondition(lambda self: len(self.asked) < 5)
    @rule(count=st.integers(1, COUNT))
    def ask(self, count: int) -> None:
        one = Borrower(self.lender, count)
        self.asked.append(one)
        self.settle()
        while len(self.lender._waiting) != len(self.asked) - len(self.held):
            one.granted.wait(0.001)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), how=st.sampled_from([None, TransferError("gone"), StillCopying("late")]))
    def end(self, data: st.DataObject, how: Exception | None) -> None:
        one = data.draw(st.sampled_from(self.held))
        self.asked.remove(one)
        if isinstance(how, StillCopying):
            self.kept.append((self.now + QUARANTINE_S, one.cells))
        one.end(how)
        self.settle()

    @rule(seconds=st.floats(0, 2))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.kept = [(until, cells) for until, cells in self.kept if until > self.now]
        _ = self.lender.num_lent  # looks at the clock
        self.settle()

    def settle(self) -> None:
        """Wait for each grant that is due, so that what can be done next hangs on no thread's pace."""
        for one in self.asked:
            taken = set().union(*(other.cells for other in self.held), *(cells for _, cells in self.kept))
            runs = "".join("x" if cell in taken else "." for cell in range(FIRST, FIRST + COUNT))
            if not one.granted.is_set() and "." * one.count not in runs:
                break
            assert one.granted.wait(60), "who waits first gets the first run that is long enough"

    @invariant()
    def each_cell_is_lent_once(self) -> None:
        out = [one.cells for one in self.held] + [cells for _, cells in self.kept]
        assert sum(map(len, out)) == len(set().union(*out))
        assert set().union(*out) <= set(range(FIRST, FIRST + COUNT))
        self.lender.check_integrity()

    def teardown(self) -> None:
        self.now += QUARANTINE_S
        while self.asked:
            _ = self.lender.num_lent
            assert self.asked[0].granted.wait(60), "a run that was asked for first comes first"
            self.asked.pop(0).end()
        assert self.lender.num_lent == 0
        with self.lender.lend(COUNT) as first:
            assert first == FIRST


LenderMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=15, deadline=None)
TestLender = LenderMachine.TestCase


@given(num_cells=st.integers(0, 200), kv_cells=st.integers(1, 200))
def test_an_area_is_as_large_as_asked_for_and_no_larger_than_all_kv(num_cells: int, kv_cells: int) -> None:
    area = StagingArea(num_cells, kv_cells, 1.0)
    assert area.num_cells <= max(min(num_cells, kv_cells), 8), "eight cells are the least"
    with ExitStack() as stack:
        lenders = [area.leaving] * 4 + [area.arriving] * 3
        firsts = [stack.enter_context(lender.lend(area.round_cells)) for lender in lenders]
        assert sorted([*firsts, area.saved]) == [i * area.round_cells for i in range(8)]
        assert area.num_lent == 7
    area.check_integrity()
    assert area.num_lent == 0


@given(first=st.integers(0, 3), count=st.integers(0, 6), num_blocks=st.integers(0, 9), most=st.integers(1, 70))
def test_rounds_are_small_enough_and_leave_nothing_out(first: int, count: int, num_blocks: int, most: int) -> None:
    layers = range(first, first + count)
    cut = list(rounds(layers, num_blocks, most))
    assert all(0 < len(some) * len(blocks) <= most for some, blocks in cut)
    cells = [(layer, block) for some, blocks in cut for layer in some for block in blocks]
    assert sorted(cells) == [(layer, block) for layer in layers for block in range(num_blocks)]


def test_who_waits_gets_cells_out_of_quarantine_though_nobody_else_comes() -> None:
    lender = CellLender(0, 4, quarantine_s=0.2)
    with pytest.raises(StillCopying), lender.lend(4):
        raise StillCopying("late")
    waiting = Borrower(lender, 4)
    assert waiting.granted.wait(60)
    waiting.end()
    lender.check_integrity()


@given(st.integers(0, 70), st.lists(st.tuples(st.booleans(), st.integers(1, 700)), max_size=60))
def test_ranges_tile_the_slab(units: int, steps: list[tuple[bool, int]]) -> None:
    allocator = SlabAllocator(64 * units + 10, alignment=64)
    allocator.check_integrity()
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
    assert allocator.allocate(64 * units) == (0 if units else None)
