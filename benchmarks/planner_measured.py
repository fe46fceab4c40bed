"""Measured runs simulated again: the same requests at the same times (``planner_runs`` measures them).

    python -m benchmarks.planner_measured --profile results/profile-runs-cpu.json

The simulator knows the profile and nothing of the runs. Every round has requests of its own, and each is
simulated with these; a point is a deployment, a workload and a rate, and its figures are means over its rounds,
measured and simulated alike. Errors are of points below saturation: those whose rate is at most ``BELOW`` of the
most requests a second that the deployment got through at any rate.

Rankings: what a deployment does in a round (good requests) is taken for the sum of a part of the deployment, a
part of the round, which all deployments share, and noise. Deployments that are the same processes, whatever
devices their topologies name, have one part in common: they repeat each other. The noise is what the analysis of
variance leaves, of one size in all rankings; two deployments are told apart where their means differ by more
than Fisher's least significant difference at 5 %. Four figures come of it:

``tau_of_kinds``: Kendall's over all pairs of different processes, of which those that are the same have one mean:
    no simulation can know which of these will come out ahead.
``tau``: Kendall's over all pairs of means, as if there were no noise.
``tau_b``: pairs that differ by no more than that difference are ties, in measurement and in simulation alike; so a
    simulated difference where there is none, and none where there is one, both count against it.
``tau_told_apart``: over the pairs that measurement tells apart, any simulated difference counts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import pi, sqrt
from pathlib import Path
from statistics import NormalDist, fmean, median, stdev
from typing import Any

import msgspec

from benchmarks.common import RESULTS, ROOT, argument_parser, write
from benchmarks.planner import kendall_tau
from benchmarks.planner_runs import RUNS, TPOT_MS, TTFT_MS, Asked, MeasuredRun
from epd_serve.bench.statistics import wilson
from epd_serve.config import load_config
from epd_serve.cost.profile import Profile
from epd_serve.sim.simulator import build, simulate
from epd_serve.sim.workloads import SimRequest
from epd_serve.topology import parse_topology


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """Noise of a deployment's rounds: squares that no part explains, and their degrees of freedom."""

    squares: float
    freedom: int

    def __add__(self, other: Noise) -> Noise:
        return Noise(squares=self.squares + other.squares, freedom=self.freedom + other.freedom)

    @classmethod
    def sum(cls, parts: Iterable[Noise]) -> Noise:
        return sum(parts, cls(squares=0.0, freedom=0))

    def least_significant_difference(self, rounds: int) -> float:
        """The least significant difference of two means over ``rounds`` rounds, at 5 %.

        Raises ValueError where nothing was repeated.
        """
        if not self.freedom:
            raise ValueError("nothing was measured twice, so nobody knows what is noise")
        return student_t(0.975, self.freedom) * math.sqrt(2 * self.squares / self.freedom / rounds)


def noise_of(measured: Mapping[str, Sequence[float]], alike: Mapping[str, Hashable]) -> Noise:
    """``measured``: of each deployment, a value for each round; ``alike``: of each, what its processes are."""
    rounds = [fmean(column) for column in zip(*measured.values(), strict=True)]
    mean = fmean(rounds)
    groups: dict[Hashable, list[str]] = {}
    for name in measured:
        groups.setdefault(alike[name], []).append(name)
    squares = 0.0
    for names in groups.values():
        part = fmean(value for name in names for value in measured[name])
        squares += sum(
            (value - part - column + mean) ** 2
            for name in names
            for value, column in zip(measured[name], rounds, strict=True)
        )
    return Noise(squares=squares, freedom=len(measured) * len(rounds) - len(groups) - len(rounds) + 1)


def rank(
    measured: Mapping[str, Sequence[float]],
    simulated: Mapping[str, Sequence[float]],
    noise: Noise,
    *,
    alike: Mapping[str, Hashable] | None = None,
    means: Sequence[Mapping[str, float]] | None = None,
) -> dict[str, Any]:
    """``measured``, ``simulated``: of each deployment, a value for each round; the more the better.

    Args:
        alike: as :func:`noise_of` has it; no two are where it is None.
        means: measured and simulated over all rounds, where that is not the mean of the rounds' values.
    """
    num_rounds = len(next(iter(measured.values())))
    least = noise.least_significant_difference(num_rounds)
    if means is None:
        means = [{name: fmean(values) for name, values in side.items()} for side in (measured, simulated)]
    kinds: dict[Hashable, list[str]] = {}
    for name in measured:
        kinds.setdefault(name if alike is None else alike[name], []).append(name)
    of_kinds = [[fmean(side[name] for name in names) for names in kinds.values()] for side in means]
    pairs = list(combinations(measured, 2))
    differences = [[side[one] - side[other] for one, other in pairs] for side in means]
    signs = [[_sign(value) if abs(value) > least else 0 for value in side] for side in differences]
    apart = [a * _sign(value) for a, value in zip(signs[0], differences[1], strict=True) if a]
    best = max(measured, key=lambda name: means[1][name])
    return {
        "rounds": num_rounds,
        "values": {
            name: {"measured": means[0][name], "simulated": means[1][name], "rounds": list(measured[name])}
            for name in sorted(measured, key=lambda name: -means[0][name])
        },
        "least_significant_difference": least,
        "degrees_of_freedom": noise.freedom,
        "standard_error": least / student_t(0.975, noise.freedom) / math.sqrt(2),
        "tau_of_kinds": kendall_tau(*reversed(of_kinds)),
        "kinds": len(kinds),
        "tau": kendall_tau(*(list(side.values()) for side in reversed(means))),
        "tau_b": tau_b(*signs),
        "pairs": len(pairs),
        "pairs_told_apart": len(apart),
        "pairs_right": apart.count(1),
        "tau_told_apart": fmean(apart) if apart else None,
        "inverted": [
            pair for pair, a, value in zip(pairs, signs[0], differences[1], strict=True) if a * _sign(value) < 0
        ],
        "choice": best,
        "choice_of_best": means[0][best] / max(means[0].values()),
    }


def student_t(probability: float, freedom: int) -> float:
    """Quantile by Cornish and Fisher's expansion: within 1 % from 4 degrees of freedom on."""
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom ** (i + 1) for i, term in enumerate(terms))


def tau_b(one: Sequence[int], other: Sequence[int]) -> float | None:
    """Kendall's of two rankings, given by the sign of each pair, 0 for a tie; None where one ranks nothing."""
    size = math.sqrt(sum(map(abs, one)) * sum(map(abs, other)))
    return sum(a * b for a, b in zip(one, other, strict=True)) / size if size else None


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


FIGURES = ("ttft_s", "tpot_s", "throughput")
BELOW = 0.75
CORES = 2


def sim_requests(run: MeasuredRun, profile: Profile) -> list[SimRequest]:
    """Those that were answered, as they were sent; each image is another one."""
    return [
        SimRequest(
            at_s=one.sent_s,
            images=((str(number), one.pixels),) if one.pixels else (),
            num_text_tokens=max(
                one.num_prompt_tokens - (profile.image_tokens(one.pixels) if one.pixels else 0), 1
            ),
            num_output_tokens=one.num_output_tokens,
        )
        for number, one in enumerate(run.requests)
        if one.num_output_tokens
    ]


def simulated(run: MeasuredRun, profile: Profile) -> list[Asked]:
    """The run's requests through the simulator."""
    requests = sim_requests(run, profile)
    if load_config(ROOT / "deploy" / run.file).settings_for("P").kv_transfer.transport == "mooncake":
        profile = profile.over("mooncake")
    deployment = build(
        parse_topology(run.topology), ["cpu"], lambda *_: profile, cores=CORES, threads=1, num_blocks=4096
    )
    found: list[Asked] = []
    for job in simulate(deployment, requests).jobs:
        assert job.first_token_s is not None and job.last_token_s is not None and job.finish_s is not None
        found.append(
            Asked(
                sent_s=job.sent_s,
                pixels=job.request.num_pixels,
                num_prompt_tokens=job.num_tokens,
                num_output_tokens=job.num_output,
                ttft_s=job.first_token_s - job.sent_s,
                tpot_s=(job.last_token_s - job.first_token_s) / max(job.num_output - 1, 1),
                finish_s=job.finish_s,
            )
        )
    return found


def is_good(one: Asked) -> bool:
    return one.num_output_tokens > 0 and 1e3 * one.ttft_s <= TTFT_MS and 1e3 * one.tpot_s <= TPOT_MS


def figures(requests: Sequence[Asked]) -> dict[str, float]:
    done = [one for one in requests if one.num_output_tokens]
    seconds = max(one.finish_s for one in done)
    share = wilson(sum(map(is_good, requests)), len(requests))
    return {
        "ttft_s": fmean(one.ttft_s for one in done),
        "tpot_s": fmean(one.tpot_s for one in done),
        "throughput": sum(one.num_output_tokens for one in done) / seconds,
        "served": len(done) / seconds,
        "attainment": share.value,
        "low": share.low,
        "high": share.high,
    }


def compare(runs: Sequence[MeasuredRun], profile: Profile) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for run in runs:
        row: dict[str, Any] = {
            "file": run.file,
            "topology": run.topology,
            "workload": run.workload,
            "rate": run.rate,
            "round": run.round,
        }
        for side, requests in (("measured", run.requests), ("simulated", simulated(run, profile))):
            row[side] = {**figures(requests), "good": sum(map(is_good, requests)), "sent": len(requests)}
        rows.append(row)
    points = points_of(rows)
    below = [one for one in points if one["below_saturation"]]
    saturated = {(one["file"], one["workload"], one["rate"]) for one in points if not one["below_saturation"]}
    single = [row for row in rows if (row["file"], row["workload"], row["rate"]) not in saturated]
    return {
        "limits": {"ttft_ms": TTFT_MS, "tpot_ms": TPOT_MS},
        "rounds": sorted({row["round"] for row in rows}),
        "points_below_saturation": len(below),
        "errors_below_saturation": {name: _errors(below, name) for name in FIGURES},
        "errors_of_all": {name: _errors(points, name) for name in FIGURES},
        "errors_of_single_runs_below_saturation": {name: _errors(single, name) for name in FIGURES},
        "rankings": _rankings(rows, points),
        "points": points,
        "runs": rows,
    }


def points_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each deployment, workload and rate: means over its rounds, whose requests are others.

    ``noise``: of each figure the standard error of simulated over measured, from how that differs between rounds;
    with one round nobody knows.
    """
    by_point: dict[tuple[str, str, float], list[dict[str, Any]]] = {}
    for row in rows:
        by_point.setdefault((row["file"], row["workload"], row["rate"]), []).append(row)
    points: list[dict[str, Any]] = []
    for (file, workload, rate), some in by_point.items():
        point: dict[str, Any] = {"file": file, "workload": workload, "rate": rate, "rounds": len(some)}
        for side in ("measured", "simulated"):
            point[side] = {name: fmean(row[side][name] for row in some) for name in (*FIGURES, "served")}
            sent = sum(row[side]["sent"] for row in some)
            point[side]["attainment"] = sum(row[side]["good"] for row in some) / sent
        if len(some) > 1:
            point["noise"] = {
                name: stdev(row["simulated"][name] / row["measured"][name] for row in some) / len(some) ** 0.5
                for name in FIGURES
            }
        points.append(point)
    for point in points:
        alike = [one for one in points if (one["file"], one["workload"]) == (point["file"], point["workload"])]
        point["below_saturation"] = point["rate"] <= BELOW * max(one["measured"]["served"] for one in alike)
    return points


def _rankings(rows: Sequence[dict[str, Any]], points: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By workload: of goodputs, and of good requests at all rates, which noise changes less."""
    files = list(dict.fromkeys(row["file"] for row in rows))
    workloads = sorted({row["workload"] for row in rows})
    alike = {file: _processes(file) for file in files}
    found: dict[str, Any] = {workload: {} for workload in workloads}
    for name, value in (("goodput", goodput), ("good_requests_a_round", _good)):
        each = {
            (workload, side): _by_round([row for row in rows if row["workload"] == workload], side, value)
            for workload in workloads
            for side in ("measured", "simulated")
        }
        total = Noise.sum(noise_of(each[workload, "measured"], alike) for workload in workloads)
        for workload in workloads:
            means = None
            if name == "goodput":  # of the mean attainment at each rate: the mean of goodputs is biased
                means = tuple(
                    {
                        file: goodput([p for p in points if (p["file"], p["workload"]) == (file, workload)], side)
                        for file in files
                    }
                    for side in ("measured", "simulated")
                )
            found[workload][name] = rank(
                each[workload, "measured"], each[workload, "simulated"], total, alike=alike, means=means
            )
    return found


def _good(rows: Sequence[dict[str, Any]], side: str) -> float:
    return float(sum(row[side]["good"] for row in rows))


def _by_round(
    rows: Sequence[dict[str, Any]], side: str, value: Callable[[Sequence[dict[str, Any]], str], float]
) -> dict[str, list[float]]:
    """Per deployment, the value of its runs in each round."""
    rounds = sorted({row["round"] for row in rows})
    return {
        file: [value([row for row in rows if (row["file"], row["round"]) == (file, one)], side) for one in rounds]
        for file in dict.fromkeys(row["file"] for row in rows)
    }


def _processes(file: str) -> tuple[object, ...]:
    """The processes of a deployment on this machine: deployments with the same are repetitions of each other."""
    config = load_config(ROOT / "deploy" / file)
    roles = tuple(sorted(str(one.role) for one in config.placement()))
    return roles, config.settings_for("P").kv_transfer.transport, config.feature_store


def _errors(rows: Sequence[dict[str, Any]], name: str) -> dict[str, float]:
    """Relative, of points or runs; ``of_noise``: the mean that noise alone would leave of a right simulation."""
    errors = [row["simulated"][name] / row["measured"][name] - 1 for row in rows]
    sizes = sorted(map(abs, errors))
    noise = [row["noise"][name] for row in rows if "noise" in row]
    known = {"of_noise": sqrt(2 / pi) * fmean(noise)} if noise else {}
    return {
        **known,
        "bias": fmean(errors),
        "mean": fmean(sizes),
        "median": median(sizes),
        "worst": sizes[-1],
        "within_10": sum(size <= 0.1 for size in sizes) / len(sizes),
    }


def goodput(rows: Sequence[dict[str, Any]], side: str) -> float:
    """The rate at which attainment falls below 90 %, between the rates that were run; it is 100 % at none."""
    known = [(0.0, 1.0), *sorted((row["rate"], row[side]["attainment"]) for row in rows)]
    for (low, above), (high, below) in pairwise(known):
        if below < 0.9:
            return float(low + (high - low) * (above - 0.9) / (above - below))
    return float(known[-1][0])


def draw(found: dict[str, Any], path: Path) -> None:
    """Simulated over measured, each a mean over rounds; open circles are of saturated deployments."""
    import matplotlib.pyplot as plt

    panels = (("ttft_s", "TTFT, s"), ("tpot_s", "TPOT, s"), ("throughput", "tokens/s"))
    figure, axes = plt.subplots(1, len(panels) + 1, figsize=(17, 4.4), layout="constrained")
    rows = found["points"]
    for axis, (name, title) in zip(axes, panels, strict=False):
        for number, file in enumerate(dict.fromkeys(row["file"] for row in rows)):
            for below in (True, False):
                some = [row for row in rows if row["file"] == file and row["below_saturation"] is below]
                axis.scatter(
                    [row["measured"][name] for row in some],
                    [row["simulated"][name] for row in some],
                    edgecolors=f"C{number}",
                    facecolors=f"C{number}" if below else "none",
                    label=file.removeprefix("cpu-").removesuffix(".yaml") if below else None,
                )
        axis.set(title=title, xscale="log", yscale="log", xlabel="measured", ylabel="simulated")
    for number, (workload, ranking) in enumerate(found["rankings"].items()):
        counts = ranking["goodput"]["values"].values()
        axes[-1].scatter(
            [one["measured"] for one in counts],
            [one["simulated"] for one in counts],
            c=f"C{number}",
            label=workload,
        )
    axes[-1].set(title="goodput, requests/s", xlabel="measured", ylabel="simulated")
    for axis in axes:
        low, high = min(axis.get_xlim()[0], axis.get_ylim()[0]), max(axis.get_xlim()[1], axis.get_ylim()[1])
        axis.plot([low, high], [low, high], color="gray", linewidth=0.8)
    axes[0].legend(fontsize=7)
    axes[-1].legend(fontsize=7)
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--profile", type=Path, default=RESULTS / "profile-runs-cpu.json")
    parser.add_argument("--runs", type=Path, default=RUNS)
    parser.add_argument("--png", action="store_true", help="draw planner-measured.png too")
    wanted = parser.parse_args()
    runs = msgspec.json.decode(wanted.runs.read_bytes(), type=list[MeasuredRun])
    found = compare(runs, Profile.read(wanted.profile))
    write(RESULTS / "planner-measured.json", found)
    for row in found["points"]:
        pairs = " ".join(f"{name} {row['measured'][name]:.4g}/{row['simulated'][name]:.4g}" for name in FIGURES)
        print(row["file"], row["workload"], row["rate"], pairs, "" if row["below_saturation"] else "saturated")
    print(json.dumps({name: value for name, value in found.items() if name not in ("runs", "points")}, indent=1))
    if wanted.png:
        draw(found, RESULTS / "planner-measured.png")


if __name__ == "__main__":
    main()
