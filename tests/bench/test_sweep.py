"""Several rates in one directory, and the search for goodput."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from load_tester import Scripted, item, session, settings

from epd_serve.bench import session as bench_session
from epd_serve.bench.run import Run
from epd_serve.bench.session import GoodputSearch
from epd_serve.bench.types import SLO, Item

LOWEST, HIGHEST = 0.1, 1000.0


def searched(search: GoodputSearch, limit: float) -> tuple[GoodputSearch, list[float]]:
    """The search at its end, and the rates that it tried."""
    rates: list[float] = []
    while (rate := search.next_rate()) is not None:
        assert len(rates) < 60
        rates.append(rate)
        search.add_result(rate, attained=rate <= limit)
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
def test_a_search_ends_despite_noise(answers: list[bool]) -> None:
    search = GoodputSearch(start=1, lowest=0.01, highest=1000, precision=0.05)
    for attained in answers:
        rate = search.next_rate()
        if rate is None:
            break
        search.add_result(rate, attained=attained)
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


@pytest.fixture(autouse=True)
def _steady(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_session, "load_workload", lambda _: Steady())


def measure(scripted: Scripted, path: Path, rates: list[float]) -> list[Run]:
    return list(session().measure_rates(path, settings(scripted.url, num_requests=4), rates))


def test_given_rates_have_fresh_requests_each(scripted: Scripted, tmp_path: Path) -> None:
    runs = measure(scripted, tmp_path, [20.0, 40.0])
    assert [(run.settings.rate, run.path.name) for run in runs] == [(20.0, "rate-20"), (40.0, "rate-40")]
    assert all(run.is_complete and (run.path / "result.json").exists() for run in runs)
    log = scripted.log()
    texts = [{log[one.request_id]["messages"][0]["content"] for one in run.records} for run in runs]
    assert not texts[0] & texts[1]
    with pytest.raises(ValueError, match="already contains a run"):
        measure(scripted, tmp_path, [20.0])


def test_a_search_measures_until_the_limit_is_known(scripted: Scripted, tmp_path: Path) -> None:
    def find(path: Path, ttft_ms: float) -> tuple[GoodputSearch, list[Run]]:
        search = GoodputSearch(start=20.0, lowest=10.0, highest=40.0, precision=0.5)
        wanted = settings(scripted.url, num_requests=4, slo=SLO(ttft_ms=ttft_ms, tpot_ms=60_000))
        return search, session().find_goodput(path, wanted, search, 0.9)

    search, runs = find(tmp_path / "good", 60_000)
    assert ([run.settings.rate for run in runs], search.attained, search.missed) == ([20.0, 40.0], 40.0, None)
    search, runs = find(tmp_path / "bad", 1)
    assert ([run.settings.rate for run in runs], search.attained, search.missed) == ([20.0, 10.0], None, 10.0)
