"""Find the best plan by enumeration from the highest bound down, or by TPE."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from epd_serve.plan.evaluate import PRECISION, TARGET, Evaluation, Evaluator
from epd_serve.plan.space import Candidate
from epd_serve.sim.spec import NoWay

#: Number of plans to simulate, starting from the highest bound.
WIDTH = 5
#: Up to this many plans are searched exhaustively.
_MAX_EXHAUSTIVE = 40
#: Relative precision of goodput in an enumeration.
_COARSE = 1.5 * PRECISION


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """``ranking``: simulated plans, best first."""

    ranking: list[Evaluation]
    strategy: str
    num_candidates: int

    @property
    def best(self) -> Evaluation:
        return self.ranking[0]


def enumerate_plans(evaluator: Evaluator, candidates: Sequence[Candidate], *, width: int | None = None) -> Found:
    """Rank plans by bound and search the ``width`` best topologies with all batching options.

    By default all topologies of a few plans are searched, which takes seconds, else those of the highest bounds.

    The first plan's goodput is found by search. Every other plan is simulated at the rate that it must exceed, and
    searched only if it does. Monolithic and disaggregated plans compete separately, to show what disaggregation
    gains. Raises ValueError if no plan meets the SLO at any rate.
    """
    goal, fleet = evaluator.goal, evaluator.fleet
    if width is None:
        width = len(candidates) if len(candidates) <= _MAX_EXHAUSTIVE else WIDTH
    bounded: list[tuple[float, Candidate]] = []
    reasons: set[str] = set()
    for one in candidates:
        try:
            bounded.append((evaluator.bound(one).rate - goal.beta * one.cost(fleet), one))
        except NoWay as error:
            reasons.add(str(error))
    bounded.sort(key=lambda pair: -pair[0])
    highest = list(dict.fromkeys(one.placed for _, one in bounded))[:width]
    seen: list[Evaluation] = []
    best: dict[bool, Evaluation] = {}
    for limit, one in bounded:
        champion = best.get(one.is_monolithic)
        if one.placed not in highest or (champion is not None and limit < champion.objective):
            continue
        if champion is None:
            challenger = evaluator.evaluate(one, precision=_COARSE)
        else:
            must = champion.goodput + goal.beta * (one.cost(fleet) - champion.cost)
            # a floor, because simulations at very low rates take long
            least = max(must, 0.01 * champion.goodput) * (1 + PRECISION)
            challenger = evaluator.evaluate(one, at_least=least, precision=_COARSE)
        seen.append(challenger)
        if challenger.goodput > 0 and (champion is None or challenger.objective > champion.objective):
            best[one.is_monolithic] = challenger
    return ranked(evaluator, "enumerate", seen, len(candidates), reasons)


def cheapest(evaluator: Evaluator, candidates: Sequence[Candidate], rate: float) -> Evaluation | None:
    """Return the cheapest plan that sustains ``rate``, monolithic first at equal cost; None if none does.

    Simulates the five plans with the highest bounds above ``rate`` at each cost.
    """
    by_cost: dict[float, list[tuple[bool, float, Candidate]]] = {}
    for one in candidates:
        try:
            limit = evaluator.bound(one).rate
        except NoWay:
            continue
        if limit >= rate:
            by_cost.setdefault(one.cost(evaluator.fleet), []).append((not one.is_monolithic, -limit, one))
    for cost in sorted(by_cost):
        tried = sorted(by_cost[cost], key=lambda each: each[:2])
        for *_, one in tried[:WIDTH]:
            if evaluator.sustains(one, rate):
                return evaluator.evaluate(one, at_least=rate, precision=_COARSE)
    return None


def tpe(evaluator: Evaluator, candidates: Sequence[Candidate], *, trials: int, seed: int) -> Found:
    """Search methods and instance counts by Bayesian optimisation (EPD, section 3.2.3) with Optuna's TPE.

    Raises ValueError without Optuna.
    """
    try:
        import optuna
    except ImportError:
        raise ValueError(
            "the strategy tpe needs Optuna: pip install '.[plan]' in epd-serve's clone, or leave out --strategy"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    by_method: dict[str, list[Candidate]] = {}
    for one in candidates:
        members = "-".join(dict.fromkeys(str(member.role) for member in one.topology.members))
        shape = "".join(letter for letter in one.line if letter in "()-")
        batching = one.order, one.max_num_seqs, one.max_num_tokens
        by_method.setdefault(f"{members} {shape} {one.pools} {batching}", []).append(one)
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
    return ranked(evaluator, "tpe", list(known.values()), len(candidates))


def ranked(
    evaluator: Evaluator,
    strategy: str,
    seen: list[Evaluation],
    num_candidates: int,
    no_ways: Collection[str] = (),
) -> Found:
    """Sort plans by objective. Raises ValueError with a reason if none meets the SLO at any rate."""
    ranking = sorted(seen, key=lambda one: -one.objective)
    if not ranking or ranking[0].goodput <= 0:
        reasons = sorted({*no_ways, *(one.reason for one in seen if one.reason)})
        why = f": {reasons[0]}" if reasons else ""
        raise ValueError(f"no plan keeps the limits for {TARGET:.0%} of requests at any rate{why}")
    return Found(ranking=ranking, strategy=strategy, num_candidates=num_candidates)
