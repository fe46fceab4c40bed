"""Several rates in one directory: given, searched for, resumed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from load_tester import Scripted, item, session, settings

from epd_serve.bench.sweep import SearchRange, Sweep, is_complete, read_sweep
from epd_serve.bench.types import SLO, Item


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
    path.mkdir(exist_ok=True)
    wanted = settings(scripted.url, rate=1.0, num_requests=4, **more)
    return Sweep(session=session(), path=path, settings=wanted, load=lambda _: Steady())


def test_given_rates_have_fresh_requests_each(scripted: Scripted, tmp_path: Path) -> None:
    outcomes = sweep(scripted, tmp_path / "s").over([20.0, 40.0])
    assert [run.settings.rate for run, _ in outcomes] == [20.0, 40.0]
    assert [run.path.name for run, _ in outcomes] == ["rate-20", "rate-40"]
    assert all(is_complete(run) for run, _ in outcomes)
    log = scripted.log()
    texts = [[log[one.request_id]["messages"][0]["content"] for one in run.records()] for run, _ in outcomes]
    assert not set(texts[0]) & set(texts[1])
    # resumed: what is complete is read, not measured again
    again = sweep(scripted, tmp_path / "s").over([20.0, 40.0, 80.0])
    assert [run.records() for run, _ in again[:2]] == [run.records() for run, _ in outcomes]
    assert len(again) == 3
    assert [one.rate for one in read_sweep(tmp_path / "s").runs] == [20.0, 40.0, 80.0]


def test_a_search_writes_down_what_it_found(scripted: Scripted, tmp_path: Path) -> None:
    good = sweep(scripted, tmp_path / "good", slo=SLO(ttft_ms=60_000, tpot_ms=60_000))
    outcomes = good.find(SearchRange(start=20.0, lowest=10.0, highest=40.0, precision=0.5))
    file = read_sweep(tmp_path / "good")
    assert [(one.rate, one.attained) for one in file.runs] == [(20.0, True), (40.0, True)]
    assert (file.goodput, file.is_bounded, len(outcomes)) == (40.0, False, 2)
    bad = sweep(scripted, tmp_path / "bad", slo=SLO(ttft_ms=1, tpot_ms=60_000))
    bad.find(SearchRange(start=20.0, lowest=10.0, highest=40.0, precision=0.5))
    file = read_sweep(tmp_path / "bad")
    assert [(one.rate, one.attained) for one in file.runs] == [(20.0, False), (10.0, False)]
    assert (file.goodput, file.is_bounded) == (None, True)
