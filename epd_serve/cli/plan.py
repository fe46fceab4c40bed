"""``epd-serve plan``: command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

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
        Path | None, typer.Option("--output", "-o", help="File for the resulting deployment.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show the ranking of plans.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Find a deployment that serves a workload within limits, and the gain of disaggregation, by simulation."""
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
