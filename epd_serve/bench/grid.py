"""Runs side by side: by deployment and load, with the columns of the EPD-Serve paper's table 5."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from epd_serve.bench.run import Run
from epd_serve.bench.types import SLO

HEADER = (
    *("deployment", "devices", "TTFT ms", "TTFT p99", "TPOT ms", "TPOT p99", "good %", "95 %"),
    *("effective tok/s per device", "tok/s", "sent", "failed"),
)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """All runs of one workload.

    Attributes:
        labels: the deployments, in the order in which they were measured.
        loads: requests a second, or in closed loops requests at once; ascending.
        runs: by label and load; the last of several.
        per_device: whether loads are per device, as deployments have different numbers of them.
        share: the share of good requests from which a load counts as served.
    """

    workload: str
    labels: tuple[str, ...]
    loads: tuple[float, ...]
    runs: dict[tuple[str, float], Run]
    per_device: bool
    share: float

    @property
    def slo(self) -> SLO:
        return next(iter(self.runs.values())).settings.slo

    @property
    def slo_text(self) -> str:
        return f"TTFT ≤ {self.slo.ttft_ms:g} ms and TPOT ≤ {self.slo.tpot_ms:g} ms"

    @property
    def unit(self) -> str:
        if any(run.rate is None for run in self.runs.values()):
            return "at once"
        return "req/s per device" if self.per_device else "req/s"

    @property
    def telling_load(self) -> float:
        """The load at which the deployments' attainment differs most; of one deployment the highest."""

        def spread(load: float) -> tuple[int, float, float]:
            shares = [run.total.attainment.value for run in self.at(load).values()]
            return len(shares), round(max(shares) - min(shares), 2), load

        return max(self.loads, key=spread)

    def of(self, label: str) -> list[tuple[float, Run]]:
        """Return the loads of one deployment, ascending."""
        return [(load, self.runs[label, load]) for load in self.loads if (label, load) in self.runs]

    def at(self, load: float) -> dict[str, Run]:
        """Return the runs at one load, by label."""
        return {label: self.runs[label, load] for label in self.labels if (label, load) in self.runs}

    def verdict(self, label: str) -> str:
        """Return a sentence: up to which load a deployment keeps the SLO, and which limit breaks first."""
        held: float | None = None
        for load, run in self.of(label):
            total = run.total
            if total.attainment.value < self.share:
                served = "at no measured load" if held is None else f"up to {held:.4g} {self.unit}"
                if total.num_failed > (1 - self.share) * total.num_requests:
                    kind = max(total.failures, key=lambda name: total.failures[name])
                    reason = f"{total.num_failed} of {total.num_requests} requests failed ({kind})"
                else:
                    worse = total.tpot_attainment.value < total.ttft_attainment.value
                    reason = f"{'TPOT' if worse else 'TTFT'} breaks first"
                return f"{label} keeps the SLO {served}; at {load:.4g} {reason}: {_good(run)}."
            held = load
        return f"{label} keeps the SLO at all measured loads, up to {held:.4g} {self.unit}: {_good(run)}."

    def rows(self, load: float) -> list[tuple[str, ...]]:
        """Return the cells below HEADER, one row for each deployment."""
        return [(label, *_cells(run)) for label, run in self.at(load).items()]


def make_grids(runs: Sequence[Run], share: float) -> list[Grid]:
    """Return one grid for each workload, in the order in which they were measured."""
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


def _load(run: Run, *, per_device: bool) -> float:
    """Return the load of a run, rounded: rates of traces differ a little from run to run."""
    if run.rate is None:
        return float(run.settings.arrivals.rpartition(":")[2])
    return round(run.rate / (run.settings.num_devices if per_device else 1), 3)


def _good(run: Run) -> str:
    one = run.total.attainment
    return f"{one.value:.0%} of {one.whole} requests were good (95 % interval {one.low:.0%} to {one.high:.0%})"


def _cells(run: Run) -> tuple[str, ...]:
    total = run.total
    latencies = [
        "none" if (value := total.ms(name, statistic)) is None else _three_digits(value)
        for name in ("ttft_scheduled", "tpot")
        for statistic in ("mean", "p99")
    ]
    good = total.attainment
    return (
        str(run.settings.num_devices),
        *latencies,
        f"{100 * good.value:.1f}",
        f"{100 * good.low:.0f}–{100 * good.high:.0f}",
        f"{total.effective_throughput_per_device:.1f}",
        f"{total.output_token_throughput:.1f}",
        str(total.num_requests),
        str(total.num_failed),
    )


def _three_digits(value: float) -> str:
    """12.3, 123, 1234: as many digits as a reader compares."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
