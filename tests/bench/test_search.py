"""The search for goodput, on functions whose answer is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.bench.sweep import GoodputSearch, SearchRange, parse_rates

LOWEST, HIGHEST = 0.1, 1000.0


def run(searched: SearchRange, limit: float) -> tuple[GoodputSearch, list[float]]:
    """The search at its end, and the rates that it tried."""
    search, rates = GoodputSearch(searched), []
    while (rate := search.next_rate()) is not None:
        assert len(rates) < 60
        rates.append(rate)
        search.tell(rate, attained=rate <= limit)
    return search, rates


@given(st.floats(LOWEST, HIGHEST), st.floats(LOWEST, HIGHEST), st.floats(0.005, 0.5))
def test_a_threshold_is_found_to_the_precision(start: float, limit: float, precision: float) -> None:
    searched = SearchRange(start=start, lowest=LOWEST, highest=HIGHEST, precision=precision)
    search, rates = run(searched, limit)
    assert search.attained is not None
    assert search.attained <= limit <= (HIGHEST if search.missed is None else search.missed)
    if search.missed is not None:
        assert limit <= search.attained * (1 + precision)
    assert len(set(rates)) == len(rates)
    assert all(LOWEST <= rate <= HIGHEST for rate in rates)


def test_a_server_that_never_attains_and_one_that_always_does() -> None:
    never, rates = run(SearchRange(start=4, lowest=1, highest=64), 0.5)
    assert (never.attained, never.missed) == (None, 1)
    assert rates == [4, 2, 1]
    always, rates = run(SearchRange(start=4, lowest=1, highest=50), 1e9)
    assert (always.attained, always.missed) == (50, None)
    assert rates == [4, 8, 16, 32, 50]


def test_doubling_then_bisection() -> None:
    _, rates = run(SearchRange(start=1, lowest=0.5, highest=100, precision=0.1), 11.0)
    assert rates == [1, 2, 4, 8, 16, 12, 10, 11]


@given(st.lists(st.booleans(), min_size=40, max_size=40))
def test_noise_ends_the_search_too(answers: list[bool]) -> None:
    search = GoodputSearch(SearchRange(start=1, lowest=0.01, highest=1000, precision=0.05))
    for attained in answers:
        rate = search.next_rate()
        if rate is None:
            break
        search.tell(rate, attained=attained)
    assert search.next_rate() is None
    if search.attained is not None and search.missed is not None:
        assert search.attained < search.missed


@pytest.mark.parametrize("start", [0.0, -1.0, 2000.0])
def test_a_range_that_is_none(start: float) -> None:
    with pytest.raises(ValueError, match="0 < lowest <= start <= highest"):
        SearchRange(start=start, lowest=LOWEST, highest=HIGHEST)


def test_rates_as_typed() -> None:
    assert parse_rates("1:12:1") == [float(rate) for rate in range(1, 13)]
    assert parse_rates("0.5:2:0.5") == [0.5, 1.0, 1.5, 2.0]
    assert parse_rates("1,2,4") == [1.0, 2.0, 4.0]
    assert parse_rates("3") == [3.0]
    for text in (
        "",
        "a",
        "0:4:1",
        "4:1:1",
        "1:4:0",
        "2,1",
        "1,1",
        "1:2",
        "0,1",
        "inf",
        "nan",
        "1:inf:1",
        "1:12:inf",
        "nan:2:1",
    ):
        with pytest.raises(ValueError, match="write FROM:TO:STEP"):
            parse_rates(text)
