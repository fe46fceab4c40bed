"""The recommended plan, and the sentences that answer whether it serves the load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from epd_serve.bench.statistics import percentile
from epd_serve.plan.deployment import deployment_yaml
from epd_serve.plan.evaluate import Evaluation, Evaluator
from epd_serve.plan.space import monolithic
from epd_serve.plan.strategies import Found

#: A disaggregated plan must be so much better than monolithic instances: a simulation is off by
#: smaller gains.
WORTH = 0.03


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """The plan to run.

    Attributes:
        rate: requests a second that were asked for.
        answer: sentences that say whether the devices are enough, and what disaggregating gains.
        ranking: plans of all devices, best first.
        deployment: the file for ``epd-serve up``.
    """

    chosen: Evaluation
    rate: float | None
    answer: list[str]
    ranking: list[Evaluation]
    deployment: str


def recommend(
    evaluator: Evaluator, found: Found, *, rate: float | None = None, enough: Evaluation | None = None
) -> Recommendation:
    """Recommend the best plan, or monolithic instances where it is hardly better than they are; where ``rate`` is
    given, the cheaper plan that is ``enough`` for it. Raises ValueError for a plan that the schema refuses.
    """
    best = found.best
    whole = _best_monolithic(evaluator, found)
    highest = best if whole is None or _is_worth(best, whole) else whole
    chosen = highest if enough is None or enough.cost >= highest.cost else enough
    ranking = [highest, *(one for one in found.ranking if one is not highest)]
    return Recommendation(
        chosen=chosen,
        rate=rate,
        answer=[*_answer(evaluator, chosen, highest, rate), *_context(evaluator, chosen, whole, ranking)],
        ranking=ranking,
        deployment=deployment_yaml(evaluator, chosen),
    )


def _is_worth(plan: Evaluation, simpler: Evaluation) -> bool:
    return simpler.goodput <= 0 or plan.objective > simpler.objective + WORTH * abs(simpler.objective)


def _best_monolithic(evaluator: Evaluator, found: Found) -> Evaluation | None:
    """Return the best plan of monolithic instances on the best plan's devices; None where no model fits in one."""
    seen = [one for one in found.ranking if one.candidate.is_monolithic and one.goodput > 0]
    if not seen:
        best = found.best.candidate
        line = monolithic(best.pools)
        variants = dict.fromkeys(replace(one.candidate, line=line, pools=best.pools) for one in found.ranking)
        seen = [one for one in map(evaluator.evaluate, variants) if one.goodput > 0]
    return max(seen, key=lambda one: one.objective, default=None)


def _answer(evaluator: Evaluator, chosen: Evaluation, highest: Evaluation, rate: float | None) -> list[str]:
    """Say whether the devices are enough for ``rate``."""
    fleet = evaluator.fleet
    used = sum(count for _, count in chosen.candidate.pools)
    lasts = (
        f"{chosen.candidate.told(fleet)} lasts up to {chosen.goodput:.2f} requests/s "
        f"on {used} of {fleet.num_devices} devices"
    )
    if rate is None:
        return [f"{lasts}."]
    if rate > highest.goodput:
        devices = math.ceil(fleet.num_devices * rate / chosen.goodput)
        return [f"Your {rate:g} requests/s do not fit on {fleet}: {lasts}. It takes about {devices} such devices."]
    said = [f"Your {rate:g} requests/s fit: {lasts}.", _latencies(evaluator, chosen, rate)]
    if chosen is not highest:
        said.append(f"With all devices {highest.candidate.told(fleet)} lasts up to {highest.goodput:.2f}.")
    return said


def _context(
    evaluator: Evaluator, chosen: Evaluation, whole: Evaluation | None, ranking: Sequence[Evaluation]
) -> list[str]:
    """Say what disaggregating gains, the price, and how far the times can be trusted."""
    fleet = evaluator.fleet
    other = next((one for one in ranking if not one.candidate.is_monolithic and not one.reason), None)
    if other is not None and not other.goodput:
        other = evaluator.evaluate(other.candidate)
    if whole is None:
        said = ["Monolithic instances have no room for the model."]
    elif other is None or not other.goodput:
        said = ["Nothing is gained by disaggregating: no other plan serves anything."]
    else:
        gain = other.goodput / whole.goodput - 1
        verdict = f"Disaggregating gains {gain:.0%}" if gain > WORTH else "Nothing is gained by disaggregating"
        plan, simple = other.candidate.told(fleet), whole.candidate.told(fleet)
        said = [
            f"{verdict}: {plan} lasts up to {other.goodput:.2f}, {simple} up to {whole.goodput:.2f} requests/s."
        ]
    if fleet.is_priced:
        every = sum(pool.price * pool.count for pool in fleet.pools)
        said.append(f"It costs {chosen.cost:,.0f} of {every:,.0f}.")
    if any(pool.measured is None for pool, _ in chosen.candidate.devices(fleet)):
        said.append("Times are analytic, from data sheets: measure with 'epd-serve profile' before you buy.")
    return said


def _latencies(evaluator: Evaluator, plan: Evaluation, rate: float) -> str:
    count = min(evaluator.count_to_confirm(rate), evaluator.most)
    ttft: list[float] = []
    tpot: list[float] = []
    for job in evaluator.simulate(plan.candidate, rate, count).jobs:
        if job.first_token_s is not None and job.last_token_s is not None:
            ttft.append(job.first_token_s - job.sent_s)
            if job.num_output > 1:
                tpot.append((job.last_token_s - job.first_token_s) / (job.num_output - 1))
    said = f"At {rate:g} requests/s TTFT is {_both(ttft)}"
    if tpot:
        said += f" and TPOT {_both(tpot)}"
    return f"{said} (median and 90th percentile)."


def _both(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    return f"{1e3 * percentile(ordered, 50):.3g} and {1e3 * percentile(ordered, 90):.3g} ms"
