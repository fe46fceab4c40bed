"""Several rates, given or searched for by doubling and bisection, each a run of its own in one directory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from epd_serve.bench.result_files import write_result_files
from epd_serve.bench.run import Run
from epd_serve.bench.session import Session
from epd_serve.bench.types import RunSettings, Workload
from epd_serve.bench.workloads import load_workload


class GoodputSearch:
    """Asks for one rate after the other; each is tried once.

    It presumes that a server which attains at a rate attains at every lower one. The answer is then within
    ``precision`` (relative) of the highest such rate, as far as that lies between ``lowest`` and ``highest``.

    Attributes:
        attained, missed: the highest rate known to attain, the lowest known not to; None while there is none.
    """

    def __init__(self, *, start: float, lowest: float, highest: float, precision: float = 0.05) -> None:
        """Raises ValueError for an empty range."""
        if not 0 < lowest <= start <= highest:
            raise ValueError(
                f"a search needs 0 < lowest <= start <= highest, not {lowest:g}, {start:g}, {highest:g}"
            )
        self._start, self._lowest, self._highest, self._precision = start, lowest, highest, precision
        self.attained: float | None = None
        self.missed: float | None = None

    def next_rate(self) -> float | None:
        """Return the next rate to try; None when the search is over."""
        if self.attained is None:
            if self.missed is None:
                return self._start
            return None if self.missed <= self._lowest else max(self.missed / 2, self._lowest)
        if self.missed is None:
            return None if self.attained >= self._highest else min(2 * self.attained, self._highest)
        if self.missed <= self.attained * (1 + self._precision):
            return None
        return (self.attained + self.missed) / 2

    def tell(self, rate: float, *, attained: bool) -> None:
        """Record whether a rate attained. Where noise contradicts an earlier answer, no bound crosses another."""
        is_above = self.attained is None or rate > self.attained
        is_below = self.missed is None or rate < self.missed
        if is_above and is_below:
            if attained:
                self.attained = rate
            else:
                self.missed = rate


def parse_rates(text: str) -> list[float]:
    """Read ``FROM:TO:STEP`` (both ends included) or a list as in ``1,2,4``, ascending and positive.

    Raises ValueError that says what would be right.
    """
    example = "write FROM:TO:STEP as in 1:12:1, or a list as in 1,2,4"
    try:
        if ":" in text:
            begin, end, step = (float(part) for part in text.split(":"))
            if not (begin > 0 and step > 0 and begin <= end < math.inf and step < math.inf):
                raise ValueError
            count = int((end - begin) / step + 1e-9) + 1
            return [round(begin + index * step, 9) for index in range(count)]
        rates = [float(part) for part in text.split(",")]
        if not all(0 < rate < math.inf for rate in rates) or rates != sorted(set(rates)):
            raise ValueError
    except ValueError:
        raise ValueError(f"rates {text!r} cannot be read; {example}") from None
    return rates


#: Between the seeds of two rates: each rate sends other pictures and texts, so that no cache helps the later ones.
_SEED_STEP = 1_000_003


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Runs one rate after the other, each with its files in a directory below ``path``.

    Attributes:
        settings: settings of all runs; rate, num_requests and seed are set for each.
        duration_s: requests for so long at each rate, in place of settings.num_requests.
        load: makes a fresh workload for each run, as its requests are taken from the begin.
    """

    session: Session
    path: Path
    settings: RunSettings
    duration_s: float | None = None
    load: Callable[[str], Workload] = load_workload

    def over(self, rates: Iterable[float | None]) -> list[Run]:
        """Measure the rates in this order; None is a load without a rate. An interrupted run ends the list."""
        return list(self._measure(rates))

    def find(self, search: GoodputSearch, target: float) -> list[Run]:
        """Measure rates until the highest that attains ``target`` is known."""
        runs = []
        for run in self._measure(iter(search.next_rate, None)):
            runs.append(run)
            if run.is_complete:
                assert run.settings.rate is not None
                search.tell(run.settings.rate, attained=run.total.attainment.value >= target)
        return runs

    def _measure(self, rates: Iterable[float | None]) -> Iterator[Run]:
        for number, rate in enumerate(rates):
            seed = self.settings.seed + number * _SEED_STEP
            settings = msgspec.structs.replace(self.settings, rate=rate, seed=seed)
            if self.duration_s is not None and rate is not None:
                settings.num_requests = max(1, math.ceil(rate * self.duration_s))
            path = self.path / ("run" if rate is None else f"rate-{rate:.12g}")  # never the same for two rates
            run = self.session.run(path, settings, self.load(self.settings.workload))
            if not run.records:
                return
            write_result_files(run)
            total = run.total
            failed = f"{total.num_failed} of {total.num_requests} failed"
            text = f"  {run.load_text}: {total.attainment.value:.1%} good, {failed}"
            self.session.console.print(text, highlight=False, soft_wrap=True)
            yield run
            if not run.is_complete:
                return
