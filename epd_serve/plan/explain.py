"""Recommend a plan, explain whether it serves the load, and write its deployment file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Table
from ruamel.yaml import YAML

from epd_serve.bench.summary import percentile
from epd_serve.config import parse_config
from epd_serve.plan.evaluate import TARGET, Evaluation, Evaluator
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
        devices = math.ceil(used * rate / chosen.goodput)
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
    jobs = evaluator.simulate(plan.candidate, rate, count).jobs
    ttft = [job.ttft_s for job in jobs if job.ttft_s is not None]
    tpot = [job.tpot_s for job in jobs if job.tpot_s is not None]
    text = f"At {rate:g} requests/s TTFT is {_percentiles(ttft)}"
    if tpot:
        text += f" and TPOT {_percentiles(tpot)}"
    return f"{text} (median and 90th percentile)."


def _percentiles(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    return f"{1e3 * percentile(ordered, 50):.3g} and {1e3 * percentile(ordered, 90):.3g} ms"


def deployment_yaml(evaluator: Evaluator, plan: Evaluation) -> str:
    """Return a file for ``epd-serve up``. Raises ValueError if the schema rejects it."""
    candidate, goal = plan.candidate, evaluator.goal
    placed = candidate.devices(evaluator.fleet)
    devices = [name for _, name in placed]
    threads = next(({"threads": pool.threads} for pool, _ in placed if pool.threads), {})
    slo: dict[str, float] = {}
    if goal.ttft_s is not None:
        slo["ttft_ms"] = 1e3 * goal.ttft_s
    if goal.tpot_s is not None:
        slo["tpot_ms"] = 1e3 * goal.tpot_s
    tree: dict[str, Any] = {
        "topology": candidate.line,
        "model": {"shape_of": evaluator.fleet.shape_of} if evaluator.fleet.shape_of else evaluator.fleet.model,
        "devices": ["cpu"] if set(devices) == {"cpu"} else devices,
        "dtype": "auto",
        "slo": slo,
        "instances": {
            "max_num_batched_tokens": candidate.step_tokens(evaluator.fleet),
            "max_num_seqs": candidate.max_num_seqs,
            **threads,
            "batching": {"order": candidate.order},
        },
    }
    stream = StringIO()
    yaml = YAML()
    yaml.default_flow_style = None
    yaml.dump(tree, stream)
    text = (
        f"# {plan.goodput:.2f} requests/s with {TARGET:.0%} within the limits, in simulation; "
        f"bottleneck: {plan.bound.bottleneck.name.lower()}.\n{stream.getvalue()}"
    )
    parse_config(text, source="the plan's deployment")
    return text


def as_dict(result: Recommendation, evaluator: Evaluator, found: Found) -> dict[str, Any]:
    """Return the recommendation as JSON for ``--json``."""
    return {
        "recommended": str(result.chosen.candidate),
        "rate": result.rate,
        "answer": result.answer,
        "goodput": result.chosen.goodput,
        "cost": result.chosen.cost,
        "bottleneck": result.chosen.bound.bottleneck.value,
        "strategy": found.strategy,
        "candidates": found.num_candidates,
        "simulations": evaluator.num_simulations,
        "simulated_requests": evaluator.num_requests,
        "ranking": [
            {
                "plan": one.candidate.describe(evaluator.fleet),
                "goodput": one.goodput,
                "objective": one.objective if one.goodput else None,
                "cost": one.cost,
                "bound": one.bound.rate,
                "bottleneck": one.bound.bottleneck.value,
                "reason": one.reason,
            }
            for one in result.ranking
        ],
        "deployment": result.deployment,
    }


def show(result: Recommendation, evaluator: Evaluator, found: Found, console: Console, *, explain: bool) -> None:
    """Print the answer; with ``explain``, also the ranking."""
    for sentence in result.answer:
        console.print(sentence, highlight=False)
    if not explain:
        return
    console.print(
        f"{found.strategy}: {found.num_candidates} plans, {evaluator.num_simulations} simulations of "
        f"{evaluator.num_requests} requests.",
        highlight=False,
    )
    table = Table("plan", "requests/s", "bound", "bottleneck", "cost", title=f"ranking, {evaluator.fleet}")
    for plan in result.ranking[:10]:
        goodput = f"{plan.goodput:.2f}" if plan.goodput else plan.reason or "less than the best"
        name = plan.candidate.describe(evaluator.fleet)
        table.add_row(name, goodput, f"{plan.bound.rate:.2f}", plan.bound.bottleneck.value, f"{plan.cost:,.0f}")
    console.print(table)
