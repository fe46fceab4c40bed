"""Several rates in one directory, and the search for goodput."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from load_tester import Scripted, item, session, settings

from epd_serve.bench.sweep import GoodputSearch, Sweep
from epd_serve.bench.types import SLO, Item

LOWEST, HIGHEST = 0.1, 1000.0


def searched(search: GoodputSearch, limit: float) -> tuple[GoodputSearch, list[float]]:
    """The search at its end, and the rates that it tried."""
    rates: list[float] = []
    while (rate := search.next_rate()) is not None:
        assert len(rates) < 60
        rates.append(rate)
        search.tell(rate, attained=rate <= limit)
    return search, rates


@given(st.floats(LOWEST, HIGHEST), st.floats(LOWEST, HIGHEST), st.floats(0.005, 0.5))
def test_a_threshold_is_found_to_the_precision(start: float, limit: float, precision: float) -> None:
    search, rates = searched(
        GoodputSearch(start=start, lowest=LOWEST, highest=HIGHEST, precision=precision), limit
    )
    assert search.attained is not None
    assert search.attained <= limit <= (HIGHEST if search.missed is None else search.missed)
    if search.missed is not None:
        assert limit <= search.attained * (1 + precision)
    assert len(set(rates)) == len(rates)
    assert all(LOWEST <= rate <= HIGHEST for rate in rates)


@given(st.lists(st.booleans(), min_size=40, max_size=40))
def test_noise_ends_the_search_too(answers: list[bool]) -> None:
    search = GoodputSearch(start=1, lowest=0.01, highest=1000, precision=0.05)
    for attained in answers:
        rate = search.next_rate()
        if rate is None:
            break
        search.tell(rate, attained=attained)
    assert search.next_rate() is None
    if search.attained is not None and search.missed is not None:
        assert search.attained < search.missed


@dataclass(frozen=True)
class Steady:
    name: str = "steady"
    num_items: int | None = None

    def items(self, seed: int) -> Iterator[Item]:
        index = 0
        while True:
            yield item(index, f"steady seed{seed} {index}")
            index += 1


def sweep(scripted: Scripted, path: Path, **more: Any) -> Sweep:
    wanted = settings(scripted.url, rate=1.0, num_requests=4, **more)
    return Sweep(session=session(), path=path, settings=wanted, load=lambda _: Steady())


def test_given_rates_have_fresh_requests_each(scripted: Scripted, tmp_path: Path) -> None:
    runs = sweep(scripted, tmp_path).over([20.0, 40.0])
    assert [(run.settings.rate, run.path.name) for run in runs] == [(20.0, "rate-20"), (40.0, "rate-40")]
    assert all(run.is_complete and (run.path / "result.json").exists() for run in runs)
    log = scripted.log()
    texts = [{log[one.request_id]["messages"][0]["content"] for one in run.records} for run in runs]
    assert not texts[0] & texts[1]
    with pytest.raises(ValueError, match="holds a run already"):
        sweep(scripted, tmp_path).over([20.0])


def test_a_search_measures_until_it_knows(scripted: Scripted, tmp_path: Path) -> None:
    def new() -> GoodputSearch:
        return GoodputSearch(start=20.0, lowest=10.0, highest=40.0, precision=0.5)

    search = new()
    runs = sweep(scripted, tmp_path / "good", slo=SLO(ttft_ms=60_000, tpot_ms=60_000)).find(search, 0.9)
    assert ([run.settings.rate for run in runs], search.attained, search.missed) == ([20.0, 40.0], 40.0, None)
    search = new()
    runs = sweep(scripted, tmp_path / "bad", slo=SLO(ttft_ms=1, tpot_ms=60_000)).find(search, 0.9)
    assert ([run.settings.rate for run in runs], search.attained, search.missed) == ([20.0, 10.0], None, 10.0)
