"""``epd-serve plan``: read, search, recommend, show."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import typer
from rich.console import Console
from rich.table import Table

from epd_serve.bench.outputs import Outputs, measured
from epd_serve.bench.types import SLO
from epd_serve.config.sections import BatchingOrder, BatchingPolicy
from epd_serve.plan.evaluate import Evaluator, Goal
from epd_serve.plan.explain import Recommendation, recommend
from epd_serve.plan.pools import read_fleet
from epd_serve.plan.space import MOST_SEQS, POLICIES, candidates, with_batching
from epd_serve.plan.strategies import Found, algorithm_2, exhaustive, race, tpe
from epd_serve.sim.records import settings_of, summary_of, write_run
from epd_serve.sim.traces import read_requests

#: Plans up to which all are simulated.
_FEW = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """The command's options as typed; ``slo`` as in ttft=2000,tpot=50."""

    trace: str
    devices: Path
    slo: str = "ttft=2000,tpot=50"
    strategy: str = "auto"
    orders: tuple[str, ...] = ("fcfs",)
    policies: tuple[str, ...] = POLICIES
    seqs: tuple[int, ...] = (MOST_SEQS,)
    tokens: tuple[int | None, ...] = (None,)
    widths: tuple[int, ...] = (1,)
    beta: float = 0.0
    num_requests: int = 2000
    trials: int = 30
    most: int = 2000
    seed: int = 0
    image_tokens: int = 0


def run_plan(wanted: Wanted, *, output: Path | None, report: Path | None, explain: bool, as_json: bool) -> None:
    """Print the recommendation. Raises ValueError for what cannot be planned."""
    fleet = read_fleet(wanted.devices)
    goal = read_goal(wanted.slo, wanted.beta)
    for flag, given, known in (
        ("--order", wanted.orders, get_args(BatchingOrder)),
        ("--policy", wanted.policies, POLICIES),
    ):
        if unknown := [one for one in given if one not in known]:
            raise ValueError(f"{flag} {unknown[0]}: there are {', '.join(known)}")
    with Console(stderr=True).status("simulating") as status:
        evaluator = Evaluator(
            fleet,
            goal,
            read_requests(
                wanted.trace, count=wanted.num_requests, seed=wanted.seed, tokens_of_image=wanted.image_tokens
            ),
            most=wanted.most,
            rated=lambda: status.update(f"simulating: {evaluator.num_simulations} runs"),
        )
        found = search(evaluator, wanted)
        result = recommend(evaluator, found, model=fleet.model)
    if output is not None:
        output.write_text(result.deployment, encoding="utf-8")
    if report is not None:
        write_simulation(report, evaluator, result, wanted)
    if as_json:
        typer.echo(json.dumps(as_dict(result, found), indent=2))
    else:
        _show(result, found, Console(), explain=explain)
        if output is None:
            typer.echo(f"\n{result.deployment}")


def read_goal(text: str, beta: float = 0.0) -> Goal:
    """``ttft=2000,tpot=50``. Raises ValueError for anything else."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = -1.0
        if name not in ("ttft", "tpot") or not 0 < limits[name] < float("inf"):
            raise ValueError(f"--slo {text}: {part!r} is no limit; write milliseconds, as in ttft=2000,tpot=50")
    ttft, tpot = limits.get("ttft"), limits.get("tpot")
    return Goal(
        ttft_s=None if ttft is None else ttft / 1e3, tpot_s=None if tpot is None else tpot / 1e3, beta=beta
    )


def search(evaluator: Evaluator, wanted: Wanted) -> Found:
    """Search with the strategy that is wanted. Raises ValueError for one that does not suit the devices."""
    fleet, strategy = evaluator.fleet, wanted.strategy
    if strategy == "algorithm-2":
        if len(fleet.pools) > 1:
            raise ValueError("algorithm 2 plans for equal devices; there are several kinds: take race or tpe")
        return algorithm_2(evaluator, fleet.num_devices)
    if "slack" in wanted.orders and evaluator.goal.ttft_s is None:
        raise ValueError("the order slack needs a limit on TTFT: --slo ttft=2000")
    fewer = evaluator.goal.beta > 0
    every = with_batching(
        candidates(fleet, widths=wanted.widths, fewer=fewer),
        cast(tuple[BatchingOrder, ...], wanted.orders),
        cast(tuple[BatchingPolicy, ...], wanted.policies),
        wanted.seqs,
        wanted.tokens,
    )
    if strategy == "tpe":
        return tpe(evaluator, every, trials=wanted.trials, seed=wanted.seed)
    if strategy == "exhaustive" or (strategy == "auto" and len(every) <= _FEW):
        return exhaustive(evaluator, every)
    return race(evaluator, every)


def write_simulation(path: Path, evaluator: Evaluator, result: Recommendation, wanted: Wanted) -> None:
    """The plan at its goodput, simulated once more with each token's time, as ``epd-serve bench`` writes a run:
    its files and, with plotly, its report. Raises ValueError where there is a run already."""
    plan, goal = result.chosen, evaluator.goal
    count = evaluator.count(plan.goodput)
    outcome = evaluator.simulate(plan.candidate, plan.goodput, count, gaps=True)
    settings = settings_of(
        evaluator.deployment(plan.candidate),
        rate=plan.goodput,
        num_requests=count,
        seed=wanted.seed,
        slo=SLO(
            ttft_ms=1e9 if goal.ttft_s is None else 1e3 * goal.ttft_s,
            tpot_ms=1e9 if goal.tpot_s is None else 1e3 * goal.tpot_s,
        ),
        model=evaluator.fleet.model,
        workload=wanted.trace,
    )
    run = write_run(path, outcome, settings)
    console = Console(stderr=True)
    Outputs().write(
        console, path, [measured(run, summary_of(outcome, settings))], title=f"Simulated: {plan.candidate}"
    )


def as_dict(result: Recommendation, found: Found) -> dict[str, Any]:
    """The recommendation as a JSON object, for ``--json``."""
    return {
        "recommended": str(result.chosen.candidate),
        "goodput": result.chosen.goodput,
        "cost": result.chosen.cost,
        "confidence": result.confidence,
        "bottleneck": result.chosen.bound.bottleneck.value,
        "reasons": result.reasons,
        "strategy": found.strategy,
        "candidates": found.num_candidates,
        "simulations": found.num_simulations,
        "simulated_requests": found.num_requests,
        "ranking": [
            {
                "plan": str(one.candidate),
                "goodput": one.goodput,
                "objective": one.objective if one.goodput else None,
                "cost": one.cost,
                "bound": one.bound.rate,
                "bottleneck": one.bound.bottleneck.value,
                "reason": one.reason,
            }
            for one in result.ranking
        ],
        "attainment": [
            {"rate": rate, "value": value, "low": low, "high": high} for rate, value, low, high in result.curve
        ],
        "deployment": result.deployment,
    }


def _show(result: Recommendation, found: Found, console: Console, *, explain: bool) -> None:
    chosen = result.chosen
    console.print(
        f"[bold]{chosen.candidate}[/]: {chosen.goodput:.2f} requests/s, cost {chosen.cost:,.0f}, confidence "
        f"{result.confidence:.0%} ({found.strategy}: {found.num_candidates} plans, {found.num_simulations} "
        f"simulations of {found.num_requests} requests)"
    )
    for sentence in result.reasons:
        console.print(sentence)
    table = Table("plan", "requests/s", "bound", "bottleneck", "cost", title="ranking")
    for one in result.ranking[:10]:
        goodput = f"{one.goodput:.2f}" if one.goodput else one.reason or "less than the best"
        stage = one.bound.bottleneck.value
        table.add_row(str(one.candidate), goodput, f"{one.bound.rate:.2f}", stage, f"{one.cost:,.0f}")
    console.print(table)
    curve = Table("requests/s", "within the limits", "95 %", title="predicted attainment")
    for rate, value, low, high in result.curve:
        curve.add_row(f"{rate:.2f}", f"{value:.1%}", f"{low:.1%} to {high:.1%}")
    console.print(curve)
    if explain:
        stages = Table(
            "stage", "seconds alone", "busiest device, per request", title=f"at {chosen.bound.rate:.2f}/s"
        )
        for stage, seconds in chosen.bound.loads.items():
            stages.add_row(stage.value, f"{seconds:.4g}", f"{chosen.bound.shares[stage]:.4g}")
        console.print(stages)
