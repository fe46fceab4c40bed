"""Batches that fill or run out of time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.sched.encode import HandoffBatcher
from epd_serve.sim.device import Clock


def test_a_batch_goes_when_it_is_full_or_late() -> None:
    clock, gone = Clock(), []
    batches = HandoffBatcher(3, 0.5, clock.after)
    for name in ("a", "b", "x"):
        batches.join("p1" if name == "x" else "p0", lambda name=name: gone.append((name, clock.now)))
    assert batches.num_waiting == 3 and not gone
    batches.join("p0", lambda: gone.append(("c", clock.now)))
    assert gone == [("a", 0.0), ("b", 0.0), ("c", 0.0)], "in order, and none of another receiver's"
    clock.run(lambda: batches.num_waiting == 0)
    assert gone[3:] == [("x", 0.5)]
    clock.run(lambda: not clock.has_events)  # the timer of the batch that was full


def test_one_at_a_time_waits_for_nothing_and_who_leaves_is_not_called() -> None:
    clock, gone = Clock(), []
    HandoffBatcher(1, 0.5, clock.after).join("p0", lambda: gone.append("a"))
    assert gone == ["a"] and not clock.has_events
    batches = HandoffBatcher(2, 0.5, clock.after)
    ticket = batches.join("p0", lambda: gone.append("b"))
    batches.leave("p0", ticket)
    batches.leave("p0", ticket)
    assert not batches.num_waiting
    batches.join("p0", lambda: gone.append("c"))
    clock.run(lambda: not clock.has_events)
    assert gone == ["a", "c"]


@given(
    size=st.integers(1, 5),
    joins=st.lists(st.tuples(st.sampled_from("pq"), st.floats(0, 1), st.booleans()), max_size=40),
)
def test_everybody_goes_once_within_the_time(size: int, joins: list[tuple[str, float, bool]]) -> None:
    clock = Clock()
    batches = HandoffBatcher(size, 0.5, clock.after)
    waited: dict[int, float] = {}
    left = set()

    def join(number: int, receiver: str, leaves: bool) -> None:
        joined_s = clock.now
        ticket = batches.join(receiver, lambda: waited.__setitem__(number, clock.now - joined_s))
        if leaves and number not in waited:
            batches.leave(receiver, ticket)
            left.add(number)

    at_s = 0.0
    for number, (receiver, gap, leaves) in enumerate(joins):
        at_s += gap
        clock.at(at_s, lambda number=number, receiver=receiver, leaves=leaves: join(number, receiver, leaves))
    clock.run(lambda: not clock.has_events)
    assert set(waited) | left == set(range(len(joins))) and not set(waited) & left
    assert all(seconds <= 0.5 + 1e-9 for seconds in waited.values())
    assert batches.num_waiting == 0


@pytest.mark.parametrize("wrong", [(0, 1.0), (2, 0.0)])
def test_a_batch_of_nothing_is_refused(wrong: tuple[int, float]) -> None:
    with pytest.raises(ValueError, match="no batch"):
        HandoffBatcher(*wrong, Clock().after)
