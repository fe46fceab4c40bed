"""Ways to find the best plan: all of them, TriInfer's heuristic, a race from the bound down, or TPE."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from epd_serve.plan.evaluate import PRECISION, Evaluation, Evaluator
from epd_serve.plan.space import Candidate
from epd_serve.sim.simulator import NoWay
from epd_serve.types import Stage

#: Of the race: plans whose goodputs are closer are the same to it.
_COARSE = 1.5 * PRECISION


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """``ranking``: best first; those that a strategy did not look at closely are left out."""

    ranking: list[Evaluation]
    strategy: str
    num_candidates: int
    num_simulations: int
    num_requests: int

    @property
    def best(self) -> Evaluation:
        return self.ranking[0]


def exhaustive(evaluator: Evaluator, candidates: Sequence[Candidate]) -> Found:
    """Every plan's goodput. Raises ValueError where no plan serves anything."""
    return _found(evaluator, "exhaustive", [evaluator.evaluate(one) for one in candidates], len(candidates))


def race(evaluator: Evaluator, candidates: Sequence[Candidate], *, width: int = 5) -> Found:
    """All plans by their bound, without a simulation; of the ``width`` highest, with all ways to batch there, the
    first is searched, and each other one is simulated once, at the rate that it must keep to be better, and
    searched from there if it does. So the field is cut down at each simulated load. Raises ValueError where no
    plan serves anything.
    """
    bounded: list[tuple[float, Candidate]] = []
    for one in candidates:
        try:
            bounded.append((evaluator.bound(one).rate - evaluator.goal.beta * one.cost(evaluator.fleet), one))
        except NoWay:
            continue
    bounded.sort(key=lambda pair: -pair[0])
    limits = {one: limit for limit, one in bounded}
    highest = list(dict.fromkeys(one.placed for _, one in bounded))[:width]
    entered = [one for _, one in bounded if one.placed in highest]
    seen: list[Evaluation] = []
    best: Evaluation | None = None
    for one in entered:
        if best is None:
            best = evaluator.evaluate(one, precision=_COARSE)
            seen.append(best)
            continue
        if limits[one] < 0.8 * best.objective:
            break
        must = best.goodput + evaluator.goal.beta * (one.cost(evaluator.fleet) - best.cost)
        challenger = evaluator.evaluate(one, at_least=max(must, 1e-9) * (1 + PRECISION), precision=_COARSE)
        seen.append(challenger)
        if challenger.objective > best.objective:
            best = challenger
    return _found(evaluator, "race", seen, len(candidates))


def algorithm_2(evaluator: Evaluator, num_instances: int) -> Found:
    """TriInfer's algorithm 2, unchanged.

    Counts of E, P and D by the time that the trace takes each of them at full batches (lines 1 to 12), then one
    replay of the trace for each of three methods (lines 13 to 22). Raises ValueError for less than three
    instances: the partition gives each stage one.
    """
    if num_instances < 3:
        raise ValueError(f"algorithm 2 gives each stage an instance, and {num_instances} are too few for three")
    whole = Candidate(line=f"{num_instances - 2}E-P-D", pools=((0, num_instances),))
    loads = evaluator.bound(whole).loads
    e, p, d = partition(num_instances, [loads.get(stage, 0.0) for stage in Stage])
    lines = [f"{e}E-{p}P-{d}D", f"{e + p}EP-{d}D", f"{e + d}ED-{p}P"]
    plans = [Candidate(line=str(Candidate(line=line, pools=()).topology), pools=whole.pools) for line in lines]
    return _found(evaluator, "algorithm 2", [evaluator.evaluate(one) for one in plans], len(plans))


def partition(total: int, times: Sequence[float]) -> list[int]:
    """Line 12: ``total`` in the ratio of times, rounded, at least one each; what rounding leaves goes by largest
    remainder."""
    whole = sum(times)
    exact = [total * time / whole if whole else total / len(times) for time in times]
    counts = [max(math.floor(value), 1) for value in exact]
    while sum(counts) < total:
        index = max(range(len(counts)), key=lambda i: exact[i] - counts[i])
        counts[index] += 1
    while sum(counts) > total:
        index = min((i for i in range(len(counts)) if counts[i] > 1), key=lambda i: exact[i] - counts[i])
        counts[index] -= 1
    return counts


def tpe(evaluator: Evaluator, candidates: Sequence[Candidate], *, trials: int, seed: int) -> Found:
    """Bayesian optimisation (EPD, section 3.2.3) by Optuna's tree-structured Parzen estimator, over the method and
    the number of its instances; what is no plan is rejected. Raises ValueError without Optuna.
    """
    optuna = _optuna()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    by_method: dict[str, list[Candidate]] = {}
    for one in candidates:
        members = "-".join(dict.fromkeys(str(member.role) for member in one.topology.members))
        shape = "".join(letter for letter in one.line if letter in "()-")
        by_method.setdefault(f"{members} {shape} {one.pools} {one.batching}", []).append(one)
    known: dict[Candidate, Evaluation] = {}

    def value(trial: Any) -> float:
        method = trial.suggest_categorical("method", list(by_method))
        plans = by_method[method]
        place = trial.suggest_float(f"place {method}", 0.0, 1.0) if len(plans) > 1 else 0.0
        plan = plans[min(int(place * len(plans)), len(plans) - 1)]
        if plan not in known:
            known[plan] = evaluator.evaluate(plan, fraction=0.5)
        return known[plan].objective if math.isfinite(known[plan].objective) else -1e9

    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    study.optimize(value, n_trials=trials)
    return _found(evaluator, "tpe", list(known.values()), len(candidates))


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise ValueError(
            "the strategy tpe needs Optuna: pip install '.[plan]' in epd-serve's clone, or take another strategy"
        ) from None
    return optuna


def _found(evaluator: Evaluator, strategy: str, seen: list[Evaluation], num_candidates: int) -> Found:
    ranking = sorted(seen, key=lambda one: -one.objective)
    if not ranking or ranking[0].goodput <= 0:
        reasons = sorted({one.reason for one in seen if one.reason})
        why = f": {reasons[0]}" if reasons else ""
        raise ValueError(f"no plan keeps the limits for {evaluator.goal.target:.0%} of requests at any rate{why}")
    return Found(
        ranking=ranking,
        strategy=strategy,
        num_candidates=num_candidates,
        num_simulations=evaluator.num_simulations,
        num_requests=evaluator.num_requests,
    )
