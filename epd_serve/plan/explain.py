"""Recommend a plan and explain whether it serves the load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from epd_serve.bench.summary import percentile
from epd_serve.plan.deployment import deployment_yaml
from epd_serve.plan.evaluate import Evaluation, Evaluator
from epd_serve.plan.space import monolithic
from epd_serve.plan.strategies import Found

#: Required gain of a disaggregated plan over monolithic instances; a simulation is less accurate than that.
MIN_GAIN = 0.03


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """The recommended plan.

    Attributes:
        rate: requested rate per second.
        answer: sentences on whether the devices suffice and what disaggregation gains.
        ranking: plans with all devices, best first.
        deployment: a file for ``epd-serve up``.
    """

    chosen: Evaluation
    rate: float | None
    answer: list[str]
    ranking: list[Evaluation]
    deployment: str


def recommend(
    evaluator: Evaluator, found: Found, *, rate: float | None = None, sufficient: Evaluation | None = None
) -> Recommendation:
    """Recommend the best plan, or monolithic instances if the gain is small, or a cheaper ``sufficient`` plan.

    Raises ValueError if the schema rejects the plan.
    """
    best = found.best
    whole = _best_monolithic(evaluator, found)
    highest = best
    if whole is not None and whole.goodput > 0:
        is_better = best.objective > whole.objective + MIN_GAIN * abs(whole.objective)
        highest = best if is_better else whole
    chosen = highest if sufficient is None or sufficient.cost >= highest.cost else sufficient
    ranking = [highest, *(one for one in found.ranking if one is not highest)]
    return Recommendation(
        chosen=chosen,
        rate=rate,
        answer=[*_answer(evaluator, chosen, highest, rate), *_context(evaluator, chosen, whole, ranking)],
        ranking=ranking,
        deployment=deployment_yaml(evaluator, chosen),
    )


def _best_monolithic(evaluator: Evaluator, found: Found) -> Evaluation | None:
    """Return the best monolithic plan on the best plan's devices; None if the model does not fit."""
    seen = [one for one in found.ranking if one.candidate.is_monolithic and one.goodput > 0]
    if not seen:
        best = found.best.candidate
        line = monolithic(best.pools)
        variants = dict.fromkeys(replace(one.candidate, line=line, pools=best.pools) for one in found.ranking)
        seen = [one for one in map(evaluator.evaluate, variants) if one.goodput > 0]
    return max(seen, key=lambda one: one.objective, default=None)


def _answer(evaluator: Evaluator, chosen: Evaluation, highest: Evaluation, rate: float | None) -> list[str]:
    """Explain whether the devices suffice for ``rate``."""
    fleet = evaluator.fleet
    used = sum(count for _, count in chosen.candidate.pools)
    capacity = (
        f"{chosen.candidate.describe(fleet)} sustains {chosen.goodput:.2f} requests/s "
        f"on {used} of {fleet.num_devices} devices"
    )
    if rate is None:
        return [f"{capacity}."]
    if rate > highest.goodput:
        devices = math.ceil(fleet.num_devices * rate / chosen.goodput)
        return [f"{fleet} cannot serve {rate:g} requests/s: {capacity}. About {devices} such devices are needed."]
    answer = [f"{rate:g} requests/s fit: {capacity}.", _describe_latencies(evaluator, chosen, rate)]
    if chosen is not highest:
        name = highest.candidate.describe(fleet)
        answer.append(f"With all devices, {name} sustains {highest.goodput:.2f} requests/s.")
    return answer


def _context(
    evaluator: Evaluator, chosen: Evaluation, whole: Evaluation | None, ranking: Sequence[Evaluation]
) -> list[str]:
    """Explain what disaggregation gains, the price, and how reliable the times are."""
    fleet = evaluator.fleet
    other = next((one for one in ranking if not one.candidate.is_monolithic and not one.reason), None)
    if other is not None and not other.goodput:
        other = evaluator.evaluate(other.candidate)
    if whole is None:
        context = ["The model does not fit into monolithic instances."]
    elif other is None or not other.goodput:
        context = ["Disaggregation gains nothing: no other plan meets the SLO at any rate."]
    else:
        gain = other.goodput / whole.goodput - 1
        verdict = f"Disaggregation gains {gain:.0%}" if gain > MIN_GAIN else "Disaggregation gains nothing"
        plan, simple = other.candidate.describe(fleet), whole.candidate.describe(fleet)
        context = [f"{verdict}: {plan} sustains {other.goodput:.2f}, {simple} {whole.goodput:.2f} requests/s."]
    if fleet.is_priced:
        every = sum(pool.price * pool.count for pool in fleet.pools)
        context.append(f"It costs {chosen.cost:,.0f} of {every:,.0f}.")
    if any(pool.measured is None for pool, _ in chosen.candidate.devices(fleet)):
        context.append("Times are computed from data sheets: measure with 'epd-serve profile' before you buy.")
    return context


def _describe_latencies(evaluator: Evaluator, plan: Evaluation, rate: float) -> str:
    count = min(evaluator.count_to_confirm(rate), evaluator.most)
    ttft: list[float] = []
    tpot: list[float] = []
    for job in evaluator.simulate(plan.candidate, rate, count).jobs:
        if job.first_token_s is not None and job.last_token_s is not None:
            ttft.append(job.first_token_s - job.sent_s)
            if job.num_output > 1:
                tpot.append((job.last_token_s - job.first_token_s) / (job.num_output - 1))
    text = f"At {rate:g} requests/s TTFT is {_percentiles(ttft)}"
    if tpot:
        text += f" and TPOT {_percentiles(tpot)}"
    return f"{text} (median and 90th percentile)."


def _percentiles(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    return f"{1e3 * percentile(ordered, 50):.3g} and {1e3 * percentile(ordered, 90):.3g} ms"
