"""Several rates, given or searched for by doubling and bisection, each a run of its own in one directory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from epd_serve.bench.run_directory import RunDirectory, read_json, write_json
from epd_serve.bench.session import Session
from epd_serve.bench.summary import summarise
from epd_serve.bench.types import RunSettings, Summary, Workload
from epd_serve.bench.workloads import load_workload


class SearchRange(msgspec.Struct, kw_only=True, frozen=True):
    """The range of a search, in requests/s, as it is written to a file. Raises ValueError where it is none.

    Attributes:
        start: the first rate to be tried.
        precision: of the answer, relative.
    """

    start: float
    lowest: float
    highest: float
    precision: float = 0.05

    def __post_init__(self) -> None:
        if not 0 < self.lowest <= self.start <= self.highest:
            raise ValueError(
                f"the search needs 0 < lowest <= start <= highest, not {self.lowest:g}, {self.start:g} and "
                f"{self.highest:g} requests/s"
            )
        if not 0 < self.precision < 1:
            raise ValueError(f"precision is a share between 0 and 1, as in 0.05; not {self.precision:g}")


class GoodputSearch:
    """Asks for one rate after the other; each is tried once.

    It presumes that a server which attains at a rate attains at every lower one. The answer is then within
    the range's precision of the highest such rate, as far as that lies in the range.

    Attributes:
        attained, missed: the highest rate known to attain, the lowest known not to; None while there is none.
    """

    def __init__(self, of: SearchRange) -> None:
        self.range = of
        self.attained: float | None = None
        self.missed: float | None = None

    def next_rate(self) -> float | None:
        """The next rate to try; None when the search is over."""
        if self.attained is None and self.missed is None:
            return self.range.start
        if self.missed is None:
            assert self.attained is not None
            highest = self.range.highest
            return None if self.attained >= highest else min(2 * self.attained, highest)
        if self.attained is None:
            return None if self.missed <= self.range.lowest else max(self.missed / 2, self.range.lowest)
        if self.missed <= self.attained * (1 + self.range.precision):
            return None
        return (self.attained + self.missed) / 2

    def tell(self, rate: float, *, attained: bool) -> None:
        """Record whether a rate attained.

        Where noise contradicts an earlier answer, no bound moves across the other.
        """
        if attained:
            if (self.attained is None or rate > self.attained) and (self.missed is None or rate < self.missed):
                self.attained = rate
        elif (self.missed is None or rate < self.missed) and (self.attained is None or rate > self.attained):
            self.missed = rate


def parse_rates(text: str) -> list[float]:
    """``FROM:TO:STEP`` (both ends included) or a list as in ``1,2,4``, ascending and positive.

    Raises ValueError that says what would be right.
    """
    example = "write FROM:TO:STEP as in 1:12:1, or a list as in 1,2,4"
    try:
        if ":" in text:
            begin, end, step = (float(part) for part in text.split(":"))
            if not (begin > 0 and step > 0 and begin <= end < math.inf and step < math.inf):
                raise ValueError
            count = int((end - begin) / step + 1e-9) + 1
            if count > 1000:
                raise ValueError
            return [round(begin + index * step, 9) for index in range(count)]
        rates = [float(part) for part in text.split(",")]
        if not all(0 < rate < math.inf for rate in rates) or rates != sorted(set(rates)):
            raise ValueError
    except ValueError:
        raise ValueError(f"rates {text!r} cannot be read; {example}") from None
    return rates


#: Between the seeds of two rates: each rate sends other pictures and texts, so that no cache helps the later ones.
_SEED_STEP = 1_000_003

Outcome = tuple[RunDirectory, Summary]


class SweepRun(msgspec.Struct, kw_only=True):
    """One rate, or None of a load without one; ``directory`` lies beside sweep.json.

    ``attained``: of a search, whether the rate was held.
    """

    rate: float | None
    directory: str
    attained: bool | None = None


class SweepFile(msgspec.Struct, kw_only=True):
    """sweep.json.

    Attributes:
        rates: as given; empty for a search.
        goodput: the highest rate of a search that attained, requests/s; None where none did.
        is_bounded: whether a rate was found that did not.
    """

    settings: RunSettings
    runs: list[SweepRun]
    rates: list[float] = []
    duration_s: float | None = None
    target: float = 0.9
    goodput: float | None = None
    is_bounded: bool = False
    search: SearchRange | None = None


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Runs one rate after the other; a directory with runs in it is gone on with.

    Attributes:
        settings: settings of all runs; rate, num_requests and seed are set for each.
        duration_s: requests for so long at each rate, in place of settings.num_requests.
        load: makes a fresh workload for each run, as its requests are taken from the begin.
    """

    session: Session
    path: Path
    settings: RunSettings
    duration_s: float | None = None
    target: float = 0.9
    load: Callable[[str], Workload] = load_workload

    def over(self, rates: list[float]) -> list[Outcome]:
        """Measure the rates in this order, or once without any; an interrupted run ends the list."""
        return self._measure(self._file(rates=rates), rates or [None], None)

    def find(self, searched: SearchRange) -> list[Outcome]:
        """Measure rates until the search is over; sweep.json has its result."""
        file, search = self._file(rates=[]), GoodputSearch(searched)
        file.search = searched
        return self._measure(file, iter(search.next_rate, None), search)

    def _measure(
        self, file: SweepFile, rates: Iterable[float | None], search: GoodputSearch | None
    ) -> list[Outcome]:
        self._write(file)
        outcomes: list[Outcome] = []
        for number, rate in enumerate(rates):
            outcome = self._one(file, number, rate)
            if outcome is None:
                break
            outcomes.append(outcome)
            if not is_complete(outcome[0]):
                break
            if search is not None and rate is not None:
                attained = outcome[1].total.attainment.value >= self.target
                search.tell(rate, attained=attained)
                file.runs[-1].attained = attained
                file.goodput, file.is_bounded = search.attained, search.missed is not None
                self._write(file)
        return outcomes

    def _one(self, file: SweepFile, number: int, rate: float | None) -> Outcome | None:
        path = self.path / ("run" if rate is None else f"rate-{rate:.12g}")  # never the same for two rates
        if (path / "run.json").exists():
            run = RunDirectory.open(path)
            if is_complete(run):
                outcome: tuple[RunDirectory, Summary | None] = (
                    run,
                    summarise(run.settings, run.records(), run.schedule(), run.segments()),
                )
            else:
                run.settings.base_url = self.settings.base_url  # a deployment that was brought up again has moved
                outcome = self.session.resume(run, self.load(self.settings.workload))
        else:
            settings = msgspec.structs.replace(
                self.settings, rate=rate, seed=self.settings.seed + number * _SEED_STEP
            )
            if self.duration_s is not None and rate is not None:
                settings.num_requests = max(1, math.ceil(rate * self.duration_s))
            outcome = self.session.begin(path, settings, self.load(self.settings.workload))
        file.runs.append(SweepRun(rate=rate, directory=path.name))
        self._write(file)
        run, summary = outcome
        if summary is None:
            return None
        total = summary.total
        load = run.settings.arrivals if rate is None else f"{rate:g} req/s"
        failed = f"{total.num_failed} of {total.num_requests} failed"
        self.session.console.print(f"  {load}: {total.attainment.value:.1%} good, {failed}", highlight=False)
        return run, summary

    def _file(self, *, rates: list[float]) -> SweepFile:
        return SweepFile(
            settings=self.settings, runs=[], rates=rates, duration_s=self.duration_s, target=self.target
        )

    def _write(self, file: SweepFile) -> None:
        write_json(self.path / "sweep.json", file)


def is_complete(run: RunDirectory) -> bool:
    segments = run.segments()
    return bool(segments) and segments[-1].ended == "complete"


def read_sweep(path: Path) -> SweepFile:
    """Read sweep.json. Raises ValueError where there is none."""
    return read_json(path / "sweep.json", SweepFile)
