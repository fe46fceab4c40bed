"""``epd-serve plan``: what is typed and what it means."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

StrategyName = Literal["enumerate", "tpe"]


def plan(
    workload: Annotated[
        str,
        typer.Option(
            help="As 'epd-serve bench' has it: sharegpt4o-like, visualwebinstruct-like, synthetic[,KEY=VALUE...], "
            "custom:FILE or trace:FILE, which may be the gateway's access log."
        ),
    ],
    devices: Annotated[str, typer.Option(help="As in 'h200 x 2, rtx-4090 x 4', or a YAML file of pools.")],
    model: Annotated[str, typer.Option(help="'demo', a directory, or a name; over the devices file's.")] = "",
    rate: Annotated[
        float | None, typer.Option(help="Requests/s that you want to serve; of a trace else its own.")
    ] = None,
    all_devices: Annotated[
        bool, typer.Option("--all-devices", help="Plan for all of them, even where fewer serve the rate.")
    ] = False,
    slo: Annotated[str, typer.Option(help="Limits in milliseconds.")] = "ttft=2000,tpot=50",
    strategy: Annotated[
        StrategyName, typer.Option(help="enumerate: from the highest bound down; tpe: by Optuna.")
    ] = "enumerate",
    order: Annotated[list[str] | None, typer.Option(help="fcfs, sjf, slack: once for each to try.")] = None,
    max_num_seqs: Annotated[
        list[int] | None, typer.Option(min=1, help="In a step, once for each to try; else 256.")
    ] = None,
    max_num_batched_tokens: Annotated[
        list[int] | None, typer.Option(min=1, help="In a step, once for each to try; else 8192, on CPUs 2048.")
    ] = None,
    tensor_parallel: Annotated[list[int] | None, typer.Option(help="Widths to try, once for each.")] = None,
    beta: Annotated[float, typer.Option(min=0, help="Requests a second that one unit of cost is worth.")] = 0.0,
    requests: Annotated[int, typer.Option(min=20, help="Of the workload, at most.")] = 2000,
    trials: Annotated[int, typer.Option(min=1, help="Of the strategy tpe.")] = 30,
    most: Annotated[int, typer.Option(min=50, help="Requests in one simulation at most.")] = 2000,
    seed: int = 0,
    image_tokens: Annotated[int, typer.Option(min=0, help="Of an image in an access log.")] = 0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the deployment file there.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show the ranking of plans.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Say what serves a workload within limits, on which devices, and what disaggregating gains; by simulation."""
    from epd_serve.plan.command import Wanted, run_plan
    from epd_serve.plan.space import MOST_SEQS

    run_plan(
        Wanted(
            workload=workload,
            devices=devices,
            model=model,
            rate=rate,
            all_devices=all_devices,
            slo=slo,
            strategy=strategy,
            orders=tuple(order or ("fcfs",)),
            seqs=tuple(max_num_seqs or (MOST_SEQS,)),
            tokens=tuple(max_num_batched_tokens or (None,)),
            widths=tuple(tensor_parallel or (1,)),
            beta=beta,
            num_requests=requests,
            trials=trials,
            most=most,
            seed=seed,
            image_tokens=image_tokens,
        ),
        output=output,
        explain=explain,
        as_json=as_json,
    )
