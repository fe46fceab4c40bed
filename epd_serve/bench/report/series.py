"""Runs sorted for plots: by deployment and by load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from epd_serve.bench.report.theme import GOODPUT_SHARE, titled
from epd_serve.bench.summary import Measured
from epd_serve.bench.types import SLO


@dataclass(frozen=True, kw_only=True)
class Grid:
    """All runs of one workload.

    Attributes:
        labels: the deployments' labels, in the order in which they were measured.
        loads: requests a second, or in closed loops how many at once; ascending.
        runs: the runs by label and load; the last of several.
        per_device: whether loads are per device: where deployments have different numbers of them.
        share: share of good requests from which a load counts as served.
    """

    workload: str
    labels: tuple[str, ...]
    loads: tuple[float, ...]
    runs: dict[tuple[str, float], Measured]
    per_device: bool
    share: float = GOODPUT_SHARE

    @property
    def slo(self) -> SLO:
        return next(iter(self.runs.values())).settings.slo

    @property
    def slo_text(self) -> str:
        return f"TTFT ≤ {self.slo.ttft_ms:g} ms and TPOT ≤ {self.slo.tpot_ms:g} ms"

    @property
    def load_title(self) -> str:
        if any(run.rate is None for run in self.runs.values()):
            return "requests at once"
        return "requests a second, per device" if self.per_device else "requests a second"

    @property
    def unit(self) -> str:
        if any(run.rate is None for run in self.runs.values()):
            return "at once"
        return "req/s per device" if self.per_device else "req/s"

    @property
    def telling(self) -> float:
        """The load that tells deployments apart: where attainment differs most, the higher one of two such.

        Of one deployment the highest. Loads that were not measured everywhere come last.
        """

        def spread(load: float) -> tuple[int, float, float]:
            shares = [run.total.attainment.value for _, _, run in self.at(load)]
            return len(shares), round(max(shares) - min(shares), 2), load

        return max(self.loads, key=spread)

    def of(self, label: str) -> list[tuple[float, Measured]]:
        """Ascending loads of one deployment."""
        return [(load, self.runs[label, load]) for load in self.loads if (label, load) in self.runs]

    def at(self, load: float) -> list[tuple[int, str, Measured]]:
        """(position of the label, label, run) of all that were measured at a load."""
        return [
            (position, label, self.runs[label, load])
            for position, label in enumerate(self.labels)
            if (label, load) in self.runs
        ]

    def good_percent(self, label: str, load: float) -> float | None:
        """The share of good requests in per cent; None where it was not measured."""
        run = self.runs.get((label, load))
        return None if run is None else 100 * run.total.attainment.value

    def goodput(self, label: str) -> float:
        """The highest load up to which attainment is ``share`` or more; between two loads on the straight line."""
        best, before = 0.0, (0.0, 1.0)
        for load, run in self.of(label):
            share = run.total.attainment.value
            if share < self.share:
                at, good = before
                return max(best, at + (load - at) * (good - self.share) / (good - share)) if best else 0.0
            best, before = load, (load, share)
        return best

    @property
    def axis(self) -> dict[str, Any]:
        """The load axis, with a tick at each load that was measured."""
        return titled(self.load_title, tickvals=list(self.loads), ticktext=self.load_texts)

    @property
    def load_texts(self) -> list[str]:
        return [f"{load:.4g}" for load in self.loads]


def grids(runs: Sequence[Measured], share: float = GOODPUT_SHARE) -> list[Grid]:
    """One grid for each workload, in the order in which they were measured."""
    found = []
    for workload in dict.fromkeys(run.workload_name for run in runs):
        some = [run for run in runs if run.workload_name == workload]
        per_device = len({run.settings.num_devices for run in some}) > 1
        keyed = {(run.label, _load(run, per_device=per_device)): run for run in some}
        found.append(
            Grid(
                workload=workload,
                labels=tuple(dict.fromkeys(run.label for run in some)),
                loads=tuple(sorted({load for _, load in keyed})),
                runs=keyed,
                per_device=per_device,
                share=share,
            )
        )
    return found


def _load(run: Measured, *, per_device: bool) -> float:
    """The load of a run, rounded: planned rates differ a little where schedules are drawn."""
    if run.rate is None:
        return float(run.settings.arrivals.rpartition(":")[2])
    return round(run.rate / (run.settings.num_devices if per_device else 1), 3)
