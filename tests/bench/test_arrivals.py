"""Schedules: seeded, of the rate they promise, and clear about what cannot be read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from load_tester import settings

from epd_serve.bench.plan import Arrivals, parse_arrivals, schedule_items
from epd_serve.bench.types import Item, Media, Message


@given(st.floats(0.1, 500), st.floats(0.2, 5), st.integers(0, 1000), st.integers(1, 50))
def test_times_ascend_and_the_seed_decides(rate: float, shape: float, seed: int, count: int) -> None:
    for kind in ("gamma", "constant"):
        arrivals = Arrivals(kind=kind, rate=rate, shape=shape)
        times = arrivals.draw_times(count, seed)
        assert len(times) == count
        assert times == sorted(times)
        assert times[0] >= 0
        assert times == arrivals.draw_times(count, seed)


@pytest.mark.parametrize(
    ("text", "rate", "message"),
    [
        ("poisson", None, "need a rate; add --rate"),
        ("poisson", 0.0, "--rate must be a positive number"),
        ("closed:4", 1.0, "leave --rate out"),
        ("closed:0", None, "unknown arrivals.*write 'poisson'"),
        ("gamma:-1", 1.0, "unknown arrivals"),
        ("normal", None, "unknown arrivals"),
    ],
)
def test_invalid_arrivals_are_refused(text: str, rate: float | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_arrivals(settings("", text, rate))


def item(index: int, **more: object) -> Item:
    message = Message(role="user", parts=("x", Media(mime="image/png", data=b"12")))
    return Item(index=index, messages=(message,), max_tokens=4, workload="w", **more)  # type: ignore[arg-type]


def test_a_conversation_is_scheduled_by_its_first_turn() -> None:
    items = [item(0), item(1, conversation="a"), item(2, conversation="b"), item(3, conversation="a", turn=1)]
    scheduled = schedule_items(items, Arrivals(kind="constant", rate=2.0), 0)
    assert [[turn.index for turn in one.turns] for one in scheduled] == [[0], [1, 3], [2]]
    assert [one.at_s for one in scheduled] == [0.0, 0.5, 1.0]
