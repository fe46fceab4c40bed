"""``epd-serve plan``: read, search, recommend, show."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast, get_args

import typer
from rich.console import Console
from rich.table import Table

from epd_serve.bench.command import Output
from epd_serve.bench.types import SLO, RunSettings
from epd_serve.config.sections import BatchingOrder, BatchingPolicy
from epd_serve.plan.evaluate import Evaluator, Goal
from epd_serve.plan.explain import Recommendation, attainment_curve, recommend
from epd_serve.plan.pools import Fleet, read_fleet
from epd_serve.plan.space import MOST_SEQS, POLICIES, Candidate, candidates, with_batching
from epd_serve.plan.strategies import Found, cheapest, enumerate_plans, tpe
from epd_serve.sim.records import write_run
from epd_serve.sim.workloads import read_load

#: Up to so many plans are all searched; of more, the topologies with the highest bounds: a search takes seconds.
_FEW = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """The command's options as typed; ``slo`` as in ttft=2000,tpot=50."""

    workload: str
    devices: str
    model: str = ""
    rate: float | None = None
    all_devices: bool = False
    slo: str = "ttft=2000,tpot=50"
    strategy: str = "enumerate"
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
    fleet = read_fleet(wanted.devices, wanted.model)
    goal = read_goal(wanted.slo, wanted.beta)
    for flag, given, known in (
        ("--order", wanted.orders, get_args(BatchingOrder)),
        ("--policy", wanted.policies, POLICIES),
    ):
        if unknown := [one for one in given if one not in known]:
            raise ValueError(f"{flag} {unknown[0]}: there are {', '.join(known)}")
    if output is not None and not output.parent.is_dir():
        raise ValueError(f"-o {output}: there is no directory {output.parent}")
    load = read_load(
        wanted.workload,
        rate=wanted.rate,
        count=wanted.num_requests,
        seed=wanted.seed,
        tokens_of_image=wanted.image_tokens,
    )
    with Console(stderr=True).status("simulating") as status:
        evaluator = Evaluator(
            fleet,
            goal,
            load.requests,
            most=wanted.most,
            rated=lambda: status.update(f"simulating: {evaluator.num_simulations} runs"),
        )
        enough = None
        if load.rate is not None and not wanted.all_devices:
            enough = cheapest(evaluator, plans(fleet, wanted, fewer=True), load.rate)
        found = search(evaluator, wanted)
        result = recommend(evaluator, found, rate=load.rate, enough=enough)
    if output is not None:
        output.write_text(result.deployment, encoding="utf-8")
    if report is not None:
        write_simulation(report, evaluator, result, wanted)
    if as_json:
        typer.echo(json.dumps(as_dict(result, evaluator, found), indent=2))
        return
    console = Console()
    console.print(f"{load.name} on {fleet}, {fleet.model}, {goal}:\n", highlight=False)
    _show(result, evaluator, found, console, explain=explain)
    if output is None:
        typer.echo(f"\nWith -o FILE it is written as a file for 'epd-serve up':\n\n{result.deployment}")
    else:
        console.print(f"\nWrote {output}. Start it: epd-serve up {output}", highlight=False, soft_wrap=True)


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
    """Search with the wanted strategy. Raises ValueError for the order slack without a limit on TTFT."""
    if "slack" in wanted.orders and evaluator.goal.ttft_s is None:
        raise ValueError("the order slack needs a limit on TTFT: --slo ttft=2000")
    every = plans(evaluator.fleet, wanted, fewer=evaluator.goal.beta > 0)
    if wanted.strategy == "tpe":
        return tpe(evaluator, every, trials=wanted.trials, seed=wanted.seed)
    if len(every) <= _FEW:
        return enumerate_plans(evaluator, every, width=None)
    return enumerate_plans(evaluator, every)


def plans(fleet: Fleet, wanted: Wanted, *, fewer: bool) -> list[Candidate]:
    """All plans with all options of steps that are wanted."""
    return with_batching(
        candidates(fleet, widths=wanted.widths, fewer=fewer),
        cast(tuple[BatchingOrder, ...], wanted.orders),
        cast(tuple[BatchingPolicy, ...], wanted.policies),
        wanted.seqs,
        wanted.tokens,
    )


def write_simulation(path: Path, evaluator: Evaluator, result: Recommendation, wanted: Wanted) -> None:
    """The plan at its goodput, simulated once more with each token's time, as ``epd-serve bench`` writes a run:
    its files and, with plotly, its report. Raises ValueError where there is a run already."""
    plan, goal = result.chosen, evaluator.goal
    count = evaluator.count(plan.goodput)
    outcome = evaluator.simulate(plan.candidate, plan.goodput, count, gaps=True)
    deployment = evaluator.deployment(plan.candidate)
    settings = RunSettings(
        base_url="simulated://",
        model=evaluator.fleet.model,
        workload=wanted.workload,
        num_requests=count,
        seed=wanted.seed,
        arrivals="poisson",
        rate=plan.goodput,
        slo=SLO(
            ttft_ms=1e9 if goal.ttft_s is None else 1e3 * goal.ttft_s,
            tpot_ms=1e9 if goal.tpot_s is None else 1e3 * goal.tpot_s,
        ),
        num_devices=deployment.num_devices,
        label=deployment.label,
        topology=deployment.label,
    )
    run = write_run(path, outcome, settings)
    Output().write(Console(stderr=True), path, [run], title=f"Simulated: {plan.candidate}")


def as_dict(result: Recommendation, evaluator: Evaluator, found: Found) -> dict[str, Any]:
    """The recommendation as a JSON object, for ``--json``."""
    return {
        "recommended": str(result.chosen.candidate),
        "rate": result.rate,
        "answer": result.answer,
        "duties": [asdict(one) for one in result.duties],
        "goodput": result.chosen.goodput,
        "cost": result.chosen.cost,
        "bottleneck": result.chosen.bound.bottleneck.value,
        "strategy": found.strategy,
        "candidates": found.num_candidates,
        "simulations": evaluator.num_simulations,
        "simulated_requests": evaluator.num_requests,
        "ranking": [
            {
                "plan": one.candidate.told(evaluator.fleet),
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
            {"rate": rate, "value": value, "low": low, "high": high}
            for rate, value, low, high in attainment_curve(evaluator, result.chosen)
        ],
        "deployment": result.deployment,
    }


def _show(result: Recommendation, evaluator: Evaluator, found: Found, console: Console, *, explain: bool) -> None:
    for sentence in result.answer:
        console.print(sentence, highlight=False)
    duties = Table("instances", "do", "on")
    for one in result.duties:
        names = one.names[0] if len(one.names) == 1 else f"{one.names[0]} to {one.names[-1]}"
        duties.add_row(one.instances, one.stages, names if names == "cpu" else f"{one.device} ({names})")
    console.print(duties)
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
        told = plan.candidate.told(evaluator.fleet)
        table.add_row(told, goodput, f"{plan.bound.rate:.2f}", plan.bound.bottleneck.value, f"{plan.cost:,.0f}")
    console.print(table)
    told = result.chosen.candidate.told(evaluator.fleet)
    curve = Table("requests/s", "within the limits", "95 %", title=f"predicted attainment of {told}")
    for rate, value, low, high in attainment_curve(evaluator, result.chosen):
        curve.add_row(f"{rate:.2f}", f"{value:.1%}", f"{low:.1%} to {high:.1%}")
    console.print(curve)
