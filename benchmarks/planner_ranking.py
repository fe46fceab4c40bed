"""Whether a simulation ranks deployments as measurement does, where some cannot be told apart by measuring.

What a deployment does in a round (good requests) is taken for the sum of a part of the deployment, a part of the
round, which all deployments share, and noise of one size. The noise is what the two-way analysis of variance
leaves; two deployments are told apart where their means differ by more than Fisher's least significant difference
at 5 %. This rule was laid down before the runs were made that it is applied to. Three figures come of it:

``tau``: Kendall's over all pairs of means, as if there were no noise.
``tau_b``: pairs that differ by no more than that difference are ties, in measurement and in simulation alike; so a
    simulated difference where there is none, and none where there is one, both count against it.
``tau_told_apart``: over the pairs that measurement tells apart, any simulated difference counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import NormalDist, fmean
from typing import Any

from benchmarks.planner_papers import kendall_tau


def rank(measured: Mapping[str, Sequence[float]], simulated: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """``measured``, ``simulated``: of each deployment, a value for each round; the more the better.

    Raises ValueError for fewer than two rounds or deployments.
    """
    least = least_significant_difference(list(measured.values()))
    means = [{name: fmean(values) for name, values in side.items()} for side in (measured, simulated)]
    pairs = list(combinations(measured, 2))
    differences = [[side[one] - side[other] for one, other in pairs] for side in means]
    signs = [[_sign(value) if abs(value) > least else 0 for value in side] for side in differences]
    apart = [a * _sign(value) for a, value in zip(signs[0], differences[1], strict=True) if a]
    best = max(measured, key=lambda name: means[1][name])
    return {
        "rounds": len(next(iter(measured.values()))),
        "good_requests_a_round": {
            name: {"measured": means[0][name], "simulated": means[1][name], "rounds": list(measured[name])}
            for name in sorted(measured, key=lambda name: -means[0][name])
        },
        "least_significant_difference": least,
        "tau": kendall_tau(*(list(side.values()) for side in reversed(means))),
        "tau_b": tau_b(*signs),
        "pairs": len(pairs),
        "pairs_told_apart": len(apart),
        "tau_told_apart": fmean(apart) if apart else None,
        "inverted": [
            pair for pair, a, value in zip(pairs, signs[0], differences[1], strict=True) if a * _sign(value) < 0
        ],
        "choice": best,
        "choice_of_best": means[0][best] / max(means[0].values()),
    }


def least_significant_difference(values: Sequence[Sequence[float]]) -> float:
    """Of two means over rounds, at 5 %; ``values``: a row for each deployment, a column for each round."""
    count, rounds = len(values), len(values[0]) if values else 0
    freedom = (count - 1) * (rounds - 1)
    if freedom < 1:
        raise ValueError(f"{count} deployments in {rounds} rounds; two of each at least tell what is noise")
    mean, columns = fmean(map(fmean, values)), [fmean(column) for column in zip(*values, strict=True)]
    squares = sum(
        (value - fmean(row) - column + mean) ** 2
        for row in values
        for value, column in zip(row, columns, strict=True)
    )
    return student_t(0.975, freedom) * math.sqrt(2 * squares / freedom / rounds)


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
