"""Whether a simulation ranks deployments as measurement does, where some cannot be told apart by measuring.

What a deployment does in a round (good requests) is taken for the sum of a part of the deployment, a part of the
round, which all deployments share, and noise. Deployments that are the same processes, whatever devices their
topologies name, have one part in common: they repeat each other. The noise is what the analysis of variance
leaves, of one size in all rankings; two deployments are told apart where their means differ by more than Fisher's
least significant difference at 5 %. Four figures come of it:

``tau_of_kinds``: Kendall's over all pairs of different processes, of which those that are the same have one mean:
    no simulation can know which of these will come out ahead.
``tau``: Kendall's over all pairs of means, as if there were no noise.
``tau_b``: pairs that differ by no more than that difference are ties, in measurement and in simulation alike; so a
    simulated difference where there is none, and none where there is one, both count against it.
``tau_told_apart``: over the pairs that measurement tells apart, any simulated difference counts.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import NormalDist, fmean
from typing import Any

from benchmarks.planner_papers import kendall_tau


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
