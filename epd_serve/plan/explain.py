"""A plan as an answer in plain words, and as a deployment file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any

from ruamel.yaml import YAML

from epd_serve.bench.statistics import percentile
from epd_serve.config import parse_config
from epd_serve.plan.evaluate import LONGER, Evaluation, Evaluator
from epd_serve.plan.pools import Fleet
from epd_serve.plan.space import Candidate, monolithic
from epd_serve.plan.strategies import Found
from epd_serve.sim.records import attainment
from epd_serve.topology.notation import members_of
from epd_serve.types import Stage

#: A plan of several kinds of instances must be so much better than monolithic ones to be worth it, and one whose
#: steps may take any time so much better than with steps within the limits.
WORTH = 0.03
_NAMES = {Stage.ENCODE: "encoding", Stage.PREFILL: "prefill", Stage.DECODE: "decode"}
_VERBS = {Stage.ENCODE: "encode", Stage.PREFILL: "prefill", Stage.DECODE: "decode"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Duty:
    """Equal instances of a plan: as the topology writes them, their stages, their kind of device and its names."""

    instances: str
    stages: str
    device: str
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """The plan to run, and why.

    Attributes:
        rate: requests a second that were asked for.
        answer: sentences that say whether the devices are enough, and what disaggregating gains.
        reasons: sentences for ``--explain``.
        ranking: plans of all devices, best first.
    """

    chosen: Evaluation
    rate: float | None
    answer: list[str]
    reasons: list[str]
    duties: list[Duty]
    ranking: list[Evaluation]
    deployment: str


def recommend(
    evaluator: Evaluator, found: Found, *, rate: float | None = None, enough: Evaluation | None = None
) -> Recommendation:
    """The best plan, or monolithic instances where it is hardly better than they are; where ``rate`` is given, the
    cheaper plan that is ``enough`` for it. Raises ValueError where the plan's deployment file breaks the schema.
    """
    best = found.best
    whole = _monolithic(evaluator, found)
    highest = best if whole is None or _is_worth(best, whole) else whole
    twin = _sized(highest, found) or highest
    if not _is_worth(highest, twin):
        highest = twin
    chosen = highest if enough is None or enough.cost >= highest.cost else enough
    ranking = [highest, *(one for one in found.ranking if one is not highest)]
    answer = _answer(evaluator, chosen, highest, whole, ranking, rate)
    if any(pool.measured is None for pool, _ in chosen.candidate.devices(evaluator.fleet)):
        answer.append("Times are analytic, from data sheets: measure with 'epd-serve profile' before you buy.")
    return Recommendation(
        chosen=chosen,
        rate=rate,
        answer=answer,
        reasons=_reasons(evaluator, chosen, found),
        duties=duties_of(chosen.candidate, evaluator.fleet),
        ranking=ranking,
        deployment=deployment_yaml(evaluator, chosen),
    )


def _sized(plan: Evaluation, found: Found) -> Evaluation | None:
    """The same plan with steps within the limits; None where it serves nothing."""
    sized = replace(plan.candidate, policy="stage-level")
    return next((one for one in found.ranking if one.candidate == sized and one.goodput), None)


def _is_worth(plan: Evaluation, simpler: Evaluation) -> bool:
    return simpler.goodput <= 0 or plan.objective > simpler.objective + WORTH * abs(simpler.objective)


def _monolithic(evaluator: Evaluator, found: Found) -> Evaluation | None:
    """The best plan of monolithic instances on the best plan's devices; None where no model fits in one."""
    seen = [one for one in found.ranking if one.candidate.is_monolithic and one.goodput > 0]
    if not seen:
        best = found.best.candidate
        line = monolithic(best.pools)
        variants = dict.fromkeys(replace(one.candidate, line=line, pools=best.pools) for one in found.ranking)
        seen = [one for one in map(evaluator.evaluate, variants) if one.goodput > 0]
    return max(seen, key=lambda one: one.objective, default=None)


def duties_of(candidate: Candidate, fleet: Fleet) -> list[Duty]:
    """What each device of a plan does."""
    found: list[Duty] = []
    for unit, pool, names in candidate.layout(fleet):
        stages = "; ".join(
            ", ".join(_VERBS[stage] for stage in Stage if stage in member.role.stages)
            for member in members_of(unit)
        )
        found.append(Duty(instances=str(unit), stages=stages, device=pool.device, names=names))
    return found


def _answer(
    evaluator: Evaluator,
    chosen: Evaluation,
    highest: Evaluation,
    whole: Evaluation | None,
    ranking: Sequence[Evaluation],
    rate: float | None,
) -> list[str]:
    fleet = evaluator.fleet
    every = f"all {fleet.num_devices} devices" if fleet.num_devices > 1 else f"the {fleet.pools[0].device}"
    gain = _gain(evaluator, highest, whole, ranking)
    most = f"{highest.candidate.told(fleet)} lasts up to {highest.goodput:.2f} requests/s"
    if rate is None:
        return [f"With {every} {most}.", gain, _cost(chosen, fleet)]
    if rate > highest.goodput:
        devices = math.ceil(fleet.num_devices * rate / highest.goodput)
        return [
            f"Your {rate:g} requests/s do not fit on {fleet}: {most}, {highest.goodput / rate:.0%} of them. "
            f"It takes about {devices} such devices.",
            gain,
            _cost(chosen, fleet),
        ]
    if chosen is highest:
        said = [f"Your {rate:g} requests/s fit on {_devices(chosen.candidate, fleet)}: {most}.", gain]
    else:
        said = [
            f"Your {rate:g} requests/s fit on {_devices(chosen.candidate, fleet)}: {chosen.candidate.told(fleet)} "
            f"lasts up to {chosen.goodput:.2f} requests/s.",
            "Nothing is gained by disaggregating: no plan needs less."
            if chosen.candidate.is_monolithic
            else "Monolithic instances need more.",
            f"With {every}: {most}. {gain}",
        ]
    return [*said, _latencies(evaluator, chosen, rate), _cost(chosen, fleet)]


def _devices(candidate: Candidate, fleet: Fleet) -> str:
    """``1 of 2 x h200``."""
    used: Counter[int] = Counter()
    for index, count in candidate.pools:
        used[index] += count
    parts = [
        (f"{count} of {pool.count} x {pool.device}" if count < pool.count else f"{count} x {pool.device}")
        for index, pool in enumerate(fleet.pools)
        if (count := used[index])
    ]
    return " and ".join(parts)


def _gain(
    evaluator: Evaluator, highest: Evaluation, whole: Evaluation | None, ranking: Sequence[Evaluation]
) -> str:
    """What disaggregating gains or loses on the devices of the highest plan."""
    fleet = evaluator.fleet
    if not highest.candidate.is_monolithic:
        if whole is None:
            return "Monolithic instances have no room for the model."
        return (
            f"Disaggregating gains {highest.goodput / whole.goodput - 1:.0%} over monolithic instances "
            f"({whole.candidate.told(fleet)}: {whole.goodput:.2f} requests/s)."
        )
    other = next((one for one in ranking if not one.candidate.is_monolithic and not one.reason), None)
    if other is None:
        return "Nothing is gained by disaggregating: no other plan serves anything."
    if not other.goodput:
        other = evaluator.evaluate(other.candidate)
    change = other.goodput / highest.goodput - 1
    name = f"{other.candidate.told(fleet)}, the best other plan,"
    least = f"more, less than the {WORTH:.0%} that it takes to be worth it" if change >= 0 else "less"
    return (
        f"Nothing is gained by disaggregating: {name} lasts up to {other.goodput:.2f}, {abs(change):.0%} {least}."
    )


def _latencies(evaluator: Evaluator, plan: Evaluation, rate: float) -> str:
    count = min(evaluator.count_to_confirm(rate), evaluator.most)
    outcome = evaluator.simulate(plan.candidate, rate, count)
    jobs = [job for job in outcome.jobs if job.first_token_s is not None and job.last_token_s is not None]
    ttft = [job.first_token_s - job.sent_s for job in jobs if job.first_token_s is not None]
    tpot = [
        (job.last_token_s - job.first_token_s) / (job.num_output - 1)
        for job in jobs
        if job.first_token_s is not None and job.last_token_s is not None and job.num_output > 1
    ]
    said = f"At {rate:g} requests/s TTFT is {_both(ttft)}"
    if tpot:
        said += f" and TPOT {_both(tpot)}"
    return f"{said} (median and 90th percentile)."


def _both(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    return f"{1e3 * percentile(ordered, 50):.3g} and {1e3 * percentile(ordered, 90):.3g} ms"


def _cost(plan: Evaluation, fleet: Fleet) -> str:
    if not fleet.is_priced:
        count = sum(count for _, count in plan.candidate.pools)
        hint = "; to weigh their costs give each kind a 'price:' in a devices file" if len(fleet.pools) > 1 else ""
        return f"It takes {count} of {fleet.num_devices} devices{hint}."
    every = sum(pool.price * pool.count for pool in fleet.pools)
    each = ", ".join(f"{pool.device} {pool.price:,.0f}" for pool in fleet.pools)
    return f"It costs {plan.cost:,.0f} of {every:,.0f} ({each} each)."


def attainment_curve(evaluator: Evaluator, plan: Evaluation) -> list[tuple[float, float, float, float]]:
    """(rate, attainment, its 95 % interval) of simulations around a plan's goodput."""
    curve = []
    for factor in (0.5, 0.75, 0.9, 1.0, 1.1, 1.25):
        rate = plan.goodput * factor
        outcome = evaluator.simulate(plan.candidate, rate, min(evaluator.count_to_confirm(rate), evaluator.most))
        share = attainment(outcome, evaluator.goal.ttft_s, evaluator.goal.tpot_s)
        curve.append((rate, share.value, share.low, share.high))
    return curve


def _reasons(evaluator: Evaluator, chosen: Evaluation, found: Found) -> list[str]:
    bound, mean = chosen.bound, evaluator.mean
    said = [
        f"A request has {mean.num_images:.2g} images to encode, {mean.num_text_tokens:.0f} tokens of text and an "
        f"answer of {mean.num_output_tokens:.0f} tokens."
    ]
    times = ", ".join(f"{_NAMES[stage]} {1e3 * seconds:.3g} ms" for stage, seconds in bound.loads.items())
    said.append(f"One instance in full batches needs for it: {times}.")
    if chosen.candidate.policy == "unlimited":
        sized = _sized(chosen, found)
        text = "Its steps are not sized by the limits"
        if sized is not None:
            text += ": with short steps, of which prompts take many, it lasts up to "
            text += f"{sized.goodput:.2f} requests/s"
        said.append(f"{text}.")
    said.append(
        f"The bottleneck is {_NAMES[bound.bottleneck]}: at {bound.rate:.2f} requests/s its devices would be "
        "busy all the time."
    )
    wanted = chosen.goodput * evaluator.horizon_s
    if wanted > evaluator.most:
        said.append(
            f"A simulation of {LONGER * evaluator.most} requests is {evaluator.most / wanted:.0%} of one in which "
            "queues have time to grow at this rate: the number is the bound's more than the simulation's; "
            "raise --most."
        )
    return said


def deployment_yaml(evaluator: Evaluator, plan: Evaluation) -> str:
    """A file for ``epd-serve up``, read back to be sure. Raises ValueError where it would not be accepted."""
    candidate, goal = plan.candidate, evaluator.goal
    placed = candidate.devices(evaluator.fleet)
    devices = [name for _, name in placed]
    threads = next(({"threads": pool.threads} for pool, _ in placed if pool.threads), {})
    batching: dict[str, Any] = {"order": candidate.order, "policy": candidate.policy}
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
            "batching": batching,
        },
    }
    stream = StringIO()
    yaml = YAML()
    yaml.default_flow_style = None
    yaml.dump(tree, stream)
    text = (
        f"# {plan.goodput:.2f} requests/s with {goal.target:.0%} within the limits, in simulation; "
        f"bottleneck: {_NAMES[plan.bound.bottleneck]}.\n{stream.getvalue()}"
    )
    parse_config(text, source="the plan's deployment")
    return text
