"""``epd-serve plan``: read the options, search, recommend, print."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import typer
from rich.console import Console
from rich.table import Table

from epd_serve.config.sections import BatchingOrder
from epd_serve.plan.evaluate import Evaluator, Goal
from epd_serve.plan.explain import Recommendation, recommend
from epd_serve.plan.pools import Fleet, read_fleet
from epd_serve.plan.space import MOST_SEQS, Candidate, candidates, with_batching
from epd_serve.plan.strategies import WIDTH, Found, cheapest, enumerate_plans, tpe
from epd_serve.sim.workloads import read_load

#: Up to this many plans are searched exhaustively; a search takes seconds.
_MAX_EXHAUSTIVE = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """The command's options as typed."""

    workload: str
    devices: str
    model: str = ""
    rate: float | None = None
    all_devices: bool = False
    slo: str = "ttft=2000,tpot=50"
    strategy: str = "enumerate"
    orders: tuple[str, ...] = ("fcfs",)
    seqs: tuple[int, ...] = (MOST_SEQS,)
    tokens: tuple[int | None, ...] = (None,)
    widths: tuple[int, ...] = (1,)
    beta: float = 0.0
    num_requests: int = 2000
    trials: int = 30
    most: int = 2000
    seed: int = 0
    image_tokens: int = 0


def run_plan(wanted: Wanted, *, output: Path | None, explain: bool, as_json: bool) -> None:
    """Print the recommendation. Raises ValueError for invalid options or if nothing can be planned."""
    fleet = read_fleet(wanted.devices, wanted.model)
    goal = read_goal(wanted.slo, wanted.beta)
    known = get_args(BatchingOrder)
    if unknown := [one for one in wanted.orders if one not in known]:
        raise ValueError(f"--order {unknown[0]} is unknown; known: {', '.join(known)}")
    if output is not None and not output.parent.is_dir():
        raise ValueError(f"-o {output}: directory {output.parent} does not exist")
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
            on_simulated=lambda: status.update(f"simulating: {evaluator.num_simulations} runs"),
        )
        sufficient = None
        if load.rate is not None and not wanted.all_devices:
            sufficient = cheapest(evaluator, plans(fleet, wanted, fewer=True), load.rate)
        found = search(evaluator, wanted)
        result = recommend(evaluator, found, rate=load.rate, sufficient=sufficient)
    if output is not None:
        output.write_text(result.deployment, encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(as_dict(result, evaluator, found), indent=2))
        return
    console = Console()
    console.print(f"{load.name} on {fleet}, {fleet.model}, {goal}:\n", highlight=False)
    _show(result, evaluator, found, console, explain=explain)
    if output is None:
        typer.echo(f"\nDeployment file for 'epd-serve up' (write it with -o FILE):\n\n{result.deployment}")
    else:
        console.print(f"\nWrote {output}. Start it: epd-serve up {output}", highlight=False, soft_wrap=True)


def read_goal(text: str, beta: float = 0.0) -> Goal:
    """Read ``ttft=2000,tpot=50``. Raises ValueError for anything else."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = -1.0
        if name not in ("ttft", "tpot") or not 0 < limits[name] < float("inf"):
            raise ValueError(f"--slo {text}: {part!r} is not a limit; write milliseconds, as in ttft=2000,tpot=50")
    ttft, tpot = limits.get("ttft"), limits.get("tpot")
    return Goal(
        ttft_s=None if ttft is None else ttft / 1e3, tpot_s=None if tpot is None else tpot / 1e3, beta=beta
    )


def search(evaluator: Evaluator, wanted: Wanted) -> Found:
    """Search with the chosen strategy. Raises ValueError for the order slack without a TTFT limit."""
    if "slack" in wanted.orders and evaluator.goal.ttft_s is None:
        raise ValueError("the order slack needs a TTFT limit, as in --slo ttft=2000")
    every = plans(evaluator.fleet, wanted, fewer=evaluator.goal.beta > 0)
    if wanted.strategy == "tpe":
        return tpe(evaluator, every, trials=wanted.trials, seed=wanted.seed)
    return enumerate_plans(evaluator, every, width=None if len(every) <= _MAX_EXHAUSTIVE else WIDTH)


def plans(fleet: Fleet, wanted: Wanted, *, fewer: bool) -> list[Candidate]:
    """Return all plans with all chosen batching options."""
    return with_batching(
        candidates(fleet, widths=wanted.widths, fewer=fewer),
        cast(tuple[BatchingOrder, ...], wanted.orders),
        wanted.seqs,
        wanted.tokens,
    )


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


def _show(result: Recommendation, evaluator: Evaluator, found: Found, console: Console, *, explain: bool) -> None:
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
