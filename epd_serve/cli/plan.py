"""``epd-serve plan``: command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal, cast, get_args

import typer

from epd_serve.cli.flags import writable

StrategyName = Literal["enumerate", "tpe"]


def plan(
    workload: Annotated[
        str,
        typer.Option(
            help="As for 'epd-serve bench': sharegpt4o-like, visualwebinstruct-like, synthetic[,KEY=VALUE...], "
            "custom:FILE or trace:FILE, which may be the gateway's access log."
        ),
    ],
    devices: Annotated[str, typer.Option(help="As in 'h200 x 2, rtx-4090 x 4', or a YAML file of pools.")],
    model: Annotated[str, typer.Option(help="'demo', a directory, or a name; overrides the devices file's.")] = "",
    rate: Annotated[
        float | None, typer.Option(help="Requests/s to serve; default for a trace: its own rate.")
    ] = None,
    all_devices: Annotated[
        bool, typer.Option("--all-devices", help="Use all devices, even if fewer can serve the rate.")
    ] = False,
    slo: Annotated[str, typer.Option(help="Limits in milliseconds.")] = "ttft=2000,tpot=50",
    strategy: Annotated[
        StrategyName, typer.Option(help="enumerate: from the highest bound down; tpe: by Optuna.")
    ] = "enumerate",
    order: Annotated[list[str] | None, typer.Option(help="Orders to try: fcfs, sjf, slack; repeatable.")] = None,
    max_num_seqs: Annotated[
        list[int] | None, typer.Option(min=1, help="Sequences per step to try; repeatable; default 256.")
    ] = None,
    max_num_batched_tokens: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens per step to try; repeatable; default 8192, on CPUs 2048."),
    ] = None,
    tensor_parallel: Annotated[list[int] | None, typer.Option(help="Widths to try; repeatable.")] = None,
    beta: Annotated[float, typer.Option(min=0, help="Requests/s that offset one unit of cost.")] = 0.0,
    requests: Annotated[int, typer.Option(min=20, help="Maximum requests of the workload.")] = 2000,
    trials: Annotated[int, typer.Option(min=1, help="Trials of the strategy tpe.")] = 30,
    most: Annotated[int, typer.Option(min=50, help="Maximum requests of one simulation.")] = 2000,
    seed: int = 0,
    image_tokens: Annotated[int, typer.Option(min=0, help="Tokens of an image in an access log.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File for the resulting deployment.", callback=writable),
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show the ranking of plans.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Find a deployment that serves a workload within limits, and the gain of disaggregation, by simulation."""
    from rich.console import Console

    from epd_serve.config.sections import BatchingOrder
    from epd_serve.plan.evaluate import Evaluator, Goal
    from epd_serve.plan.explain import as_dict, recommend, show
    from epd_serve.plan.pools import read_fleet
    from epd_serve.plan.space import MOST_SEQS, Candidate, candidates, with_batching
    from epd_serve.plan.strategies import cheapest, enumerate_plans, tpe
    from epd_serve.sim.workloads import read_load

    fleet, goal = read_fleet(devices, model), Goal.read(slo, beta)
    orders, known = order or ["fcfs"], get_args(BatchingOrder)
    if unknown := [one for one in orders if one not in known]:
        raise ValueError(f"--order {unknown[0]} is unknown; known: {', '.join(known)}")
    if "slack" in orders and goal.ttft_s is None:
        raise ValueError("the order slack needs a TTFT limit, as in --slo ttft=2000")
    load = read_load(workload, rate=rate, count=requests, seed=seed, tokens_of_image=image_tokens)

    def plans(*, fewer: bool) -> list[Candidate]:
        return with_batching(
            candidates(fleet, widths=tensor_parallel or (1,), fewer=fewer),
            cast(list[BatchingOrder], orders),
            max_num_seqs or (MOST_SEQS,),
            max_num_batched_tokens or (None,),
        )

    with Console(stderr=True).status("simulating") as status:
        evaluator = Evaluator(
            fleet,
            goal,
            load.requests,
            most=most,
            on_simulated=lambda: status.update(f"simulating: {evaluator.num_simulations} runs"),
        )
        sufficient = None
        if load.rate is not None and not all_devices:
            sufficient = cheapest(evaluator, plans(fewer=True), load.rate)
        every = plans(fewer=beta > 0)
        if strategy == "tpe":
            found = tpe(evaluator, every, trials=trials, seed=seed)
        else:
            found = enumerate_plans(evaluator, every)
        result = recommend(evaluator, found, rate=load.rate, sufficient=sufficient)
    if output is not None:
        output.write_text(result.deployment, encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(as_dict(result, evaluator, found), indent=2))
        return
    console = Console()
    console.print(f"{load.name} on {fleet}, {fleet.model}, {goal}:\n", highlight=False)
    show(result, evaluator, found, console, explain=explain)
    if output is None:
        typer.echo(f"\nDeployment file for 'epd-serve up' (write it with -o FILE):\n\n{result.deployment}")
    else:
        console.print(f"\nWrote {output}. Start it: epd-serve up {output}", highlight=False, soft_wrap=True)
