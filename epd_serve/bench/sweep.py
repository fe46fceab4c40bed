"""Several rates, given or searched for, each a run of its own in one directory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from epd_serve.bench.run_directory import RunDirectory
from epd_serve.bench.search import GoodputSearch
from epd_serve.bench.session import Session
from epd_serve.bench.summary import summarise
from epd_serve.bench.types import RunSettings, Summary, Workload

#: Between the seeds of two rates: each rate sends other pictures and texts, so that no cache helps the later ones.
_SEED_STEP = 1_000_003

Outcome = tuple[RunDirectory, Summary]


class SweepRun(msgspec.Struct, kw_only=True):
    """One rate; ``directory`` lies beside sweep.json. ``attained``: of a search, whether the rate was held."""

    rate: float
    directory: str
    attained: bool | None = None


class SearchRange(msgspec.Struct, kw_only=True):
    """The start, bounds and precision of a GoodputSearch, as they are written to a file."""

    start: float
    lowest: float
    highest: float
    precision: float

    def search(self) -> GoodputSearch:
        """Return a search over the range. Raises ValueError where the bounds make no range."""
        return GoodputSearch(start=self.start, lowest=self.lowest, highest=self.highest, precision=self.precision)


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
        load_workload: makes a fresh workload for each run, as its requests are taken from the begin.
    """

    session: Session
    path: Path
    settings: RunSettings
    load_workload: Callable[[], Workload]
    duration_s: float | None = None
    target: float = 0.9
    ended: Callable[[Outcome], None] = lambda _: None

    def over(self, rates: list[float]) -> list[Outcome]:
        """Measure the rates in this order; an interrupted run ends the list."""
        file = self._file(rates=rates)
        self._write(file)
        outcomes: list[Outcome] = []
        for number, rate in enumerate(rates):
            outcome = self._one(file, number, rate)
            if outcome is None:
                break
            outcomes.append(outcome)
            if not is_complete(outcome[0]):
                break
        return outcomes

    def find(self, searched: SearchRange) -> list[Outcome]:
        """Measure rates until the search is over; sweep.json has its result.

        Raises ValueError for bounds that make no range.
        """
        search = searched.search()
        file = self._file(rates=[])
        file.search = searched
        self._write(file)
        outcomes: list[Outcome] = []
        while (rate := search.next_rate()) is not None:
            outcome = self._one(file, len(outcomes), rate)
            if outcome is None:
                break
            outcomes.append(outcome)
            if not is_complete(outcome[0]):
                break
            attained = outcome[1].total.attainment.value >= self.target
            search.tell(rate, attained=attained)
            file.runs[-1].attained = attained
            file.goodput, file.is_bounded = search.attained, search.missed is not None
            self._write(file)
        return outcomes

    def _one(self, file: SweepFile, number: int, rate: float) -> Outcome | None:
        path = self.path / f"rate-{rate:.12g}"  # never the same for two rates
        if (path / "run.json").exists():
            run = RunDirectory.open(path)
            if is_complete(run):
                outcome: tuple[RunDirectory, Summary | None] = (
                    run,
                    summarise(run.settings, run.records(), run.schedule(), run.segments()),
                )
            else:
                run.settings.base_url = self.settings.base_url  # a deployment that was brought up again has moved
                outcome = self.session.resume(run, self.load_workload())
        else:
            settings = msgspec.structs.replace(
                self.settings, rate=rate, seed=self.settings.seed + number * _SEED_STEP
            )
            if self.duration_s is not None:
                settings.num_requests = max(1, math.ceil(rate * self.duration_s))
            outcome = self.session.begin(path, settings, self.load_workload())
        file.runs.append(SweepRun(rate=rate, directory=path.name))
        self._write(file)
        run, summary = outcome
        if summary is None:
            return None
        self.ended((run, summary))
        return run, summary

    def _file(self, *, rates: list[float]) -> SweepFile:
        return SweepFile(
            settings=self.settings, runs=[], rates=rates, duration_s=self.duration_s, target=self.target
        )

    def _write(self, file: SweepFile) -> None:
        half = self.path / ".sweep.json"
        half.write_bytes(msgspec.json.format(msgspec.json.encode(file), indent=2))
        half.replace(self.path / "sweep.json")


def is_complete(run: RunDirectory) -> bool:
    segments = run.segments()
    return bool(segments) and segments[-1].ended == "complete"


def read_sweep(path: Path) -> SweepFile:
    """Read sweep.json. Raises ValueError where there is none."""
    try:
        return msgspec.json.decode((path / "sweep.json").read_bytes(), type=SweepFile)
    except FileNotFoundError:
        raise ValueError(f"{path} is no sweep: it has no sweep.json") from None
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path / 'sweep.json'}: {error}") from error
