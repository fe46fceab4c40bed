"""A plan in plain words, and as a deployment file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from io import StringIO
from typing import Any

from ruamel.yaml import YAML

from epd_serve.config import parse_config
from epd_serve.plan.evaluate import LONGER, Evaluation, Evaluator
from epd_serve.plan.strategies import Found
from epd_serve.sim.records import attainment
from epd_serve.types import Stage

#: A plan of several kinds of instances must be so much better than monolithic ones to be worth it, and one whose
#: steps may take any time so much better than with steps within the limits.
WORTH = 0.03
_NAMES = {Stage.ENCODE: "encoding", Stage.PREFILL: "prefill", Stage.DECODE: "decode"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """The plan to run, and the reasons for it.

    Attributes:
        confidence: of the repetitions with other stretches of the trace, the part in which the plan kept the
            target at its goodput (less the search's precision) and the next best topology did not do better.
        curve: (rate, attainment, its interval) around the goodput.
        reasons: sentences.
    """

    chosen: Evaluation
    ranking: list[Evaluation]
    confidence: float
    curve: list[tuple[float, float, float, float]]
    reasons: list[str]
    deployment: str


def recommend(evaluator: Evaluator, found: Found, *, model: str, repetitions: int = 3) -> Recommendation:
    """The best plan, or monolithic instances where it is hardly better than they are. Raises ValueError where the
    deployment file of the plan breaks the schema, which says what is wrong."""
    best = found.best
    whole = next((one for one in found.ranking if one.candidate.is_monolithic), None)
    if whole is None:
        whole = _monolithic(evaluator, found)
    chosen = best if whole is None or _is_worth(best, whole) else whole
    sized = replace(chosen.candidate, policy="stage-level")
    twin = next((one for one in found.ranking if one.candidate == sized and one.goodput), chosen)
    if not _is_worth(chosen, twin):
        chosen = twin
    ranking = [chosen, *(one for one in found.ranking if one is not chosen)]
    confidence, curve = _confidence(evaluator, ranking, repetitions)
    return Recommendation(
        chosen=chosen,
        ranking=ranking,
        confidence=confidence,
        curve=curve,
        reasons=_reasons(evaluator, chosen, whole, best, found),
        deployment=deployment_yaml(evaluator, chosen, model),
    )


def _is_worth(plan: Evaluation, simpler: Evaluation) -> bool:
    return plan.objective > simpler.objective + WORTH * abs(simpler.objective)


def _monolithic(evaluator: Evaluator, found: Found) -> Evaluation | None:
    """The best plan of monolithic instances on the best plan's devices; None where these are of several kinds."""
    best = found.best.candidate
    if len(best.pools) != 1:
        return None
    ((_, count),) = best.pools
    line = f"{count if count > 1 else ''}EPD"
    variants = dict.fromkeys(replace(one.candidate, line=line, pools=best.pools) for one in found.ranking)
    return max(map(evaluator.evaluate, variants), key=lambda one: one.objective)


def _confidence(
    evaluator: Evaluator, ranking: list[Evaluation], repetitions: int
) -> tuple[float, list[tuple[float, float, float, float]]]:
    chosen, target = ranking[0], evaluator.goal.target
    rival = next((one for one in ranking if one.candidate.placed != chosen.candidate.placed), None)
    rate, must = 0.98 * chosen.goodput, 1.02 * chosen.goodput
    won = 0

    def shown(rate: float) -> int:
        """Requests of a simulation: enough for queues to grow, if there may be as many."""
        return min(evaluator.count_to_confirm(rate), evaluator.most)

    for shift in range(1, repetitions + 1):
        kept = evaluator.attainment(chosen.candidate, rate, shown(rate), shift=shift).value >= target
        better = rival is not None and 0 < must <= rival.bound.rate
        if better and rival is not None:
            better = evaluator.attainment(rival.candidate, must, shown(must), shift=shift).value >= target
        won += kept and not better
    curve = []
    for factor in (0.5, 0.75, 0.9, 1.0, 1.1, 1.25):
        outcome = evaluator.simulate(chosen.candidate, chosen.goodput * factor, shown(chosen.goodput * factor))
        share = attainment(outcome, evaluator.goal.ttft_s, evaluator.goal.tpot_s)
        curve.append((chosen.goodput * factor, share.value, share.low, share.high))
    return won / repetitions, curve


def _reasons(
    evaluator: Evaluator, chosen: Evaluation, whole: Evaluation | None, best: Evaluation, found: Found
) -> list[str]:
    bound, mean = chosen.bound, evaluator.mean
    said = [
        f"A request has {mean.num_images:.2g} images to encode, {mean.num_text_tokens:.0f} tokens of text and an "
        f"answer of {mean.num_output_tokens:.0f} tokens."
    ]
    times = ", ".join(f"{_NAMES[stage]} {1e3 * seconds:.3g} ms" for stage, seconds in bound.loads.items())
    said.append(f"One instance in full batches needs for it: {times}.")
    if chosen.candidate.is_monolithic:
        many = chosen.candidate.topology.num_instances > 1
        what = "monolithic instances are" if many else "one monolithic instance is"
        said.append(
            f"Do not disaggregate: {what} better here. The best other plan, {_best_other(found, chosen)}, is not "
            f"better by the {WORTH:.0%} that moving features and KV is worth."
        )
    else:
        gain = "" if whole is None or not whole.goodput else f", {chosen.goodput / whole.goodput - 1:+.0%}"
        against = "" if whole is None else f" ({whole.candidate}: {whole.goodput:.2f} requests/s{gain})"
        said.append(f"{chosen.candidate} is better than monolithic instances{against}.")
    if chosen.candidate.policy == "unlimited":
        said.append(f"Its steps are not sized by the limits{_so_sized(chosen, found)}.")
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
    if any(pool.is_analytic for pool, _ in chosen.candidate.devices(evaluator.fleet)):
        said.append("Times are analytic, from data sheets: measure with 'epd-serve profile' before you buy.")
    return said


def _so_sized(chosen: Evaluation, found: Found) -> str:
    sized = replace(chosen.candidate, policy="stage-level")
    seen = next((one for one in found.ranking if one.candidate == sized), None)
    if seen is None or not seen.goodput:
        return ""
    return f": with short steps, of which prompts take many, it lasts up to {seen.goodput:.2f} requests/s"


def _best_other(found: Found, chosen: Evaluation) -> str:
    other = next((one for one in found.ranking if one is not chosen and not one.candidate.is_monolithic), None)
    return "of those tried" if other is None else f"{other.candidate} with {other.goodput:.2f} requests/s"


def deployment_yaml(evaluator: Evaluator, plan: Evaluation, model: str) -> str:
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
        "model": model,
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
