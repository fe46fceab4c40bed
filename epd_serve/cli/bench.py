"""``epd-serve bench``: command line."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from epd_serve.cli.admin import Deployment, server_url
from epd_serve.cli.flags import BaseUrl

_WORKLOADS = "sharegpt4o-like, visualwebinstruct-like, synthetic[,KEY=VALUE...], custom:FILE or trace:FILE"


def bench(
    base_url: BaseUrl = "",
    deployment: Deployment = None,
    workload: Annotated[str, typer.Option(help=_WORKLOADS)] = "synthetic",
    model: Annotated[str | None, typer.Option(help="Model; required if the server has several.")] = None,
    num_requests: Annotated[int, typer.Option(min=0, help="Requests of each run; 0 for the whole workload.")] = 0,
    duration: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds of requests at each rate; overrides --num-requests.")
    ] = None,
    arrivals: Annotated[
        str, typer.Option(help="poisson, constant, gamma:SHAPE, trace or closed:CONCURRENCY.")
    ] = "poisson",
    rate: Annotated[
        float | None, typer.Option(help="Requests/s; with --find-goodput the first rate to try.")
    ] = None,
    rates: Annotated[str | None, typer.Option(help="Run once per rate, as in 1:12:1 or 1,2,4.")] = None,
    find_goodput: Annotated[
        bool, typer.Option("--find-goodput", help="Search for the highest rate that attains the SLO.")
    ] = False,
    attainment: Annotated[
        float, typer.Option(min=0.01, max=1, help="Fraction of requests that must meet the SLO in the search.")
    ] = 0.9,
    precision: Annotated[float, typer.Option(min=0.001, max=0.5, help="Relative precision of the search.")] = 0.05,
    max_rate: Annotated[float, typer.Option(help="Highest rate of the search.")] = 1000.0,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Client slots; waiting for one counts as latency.")
    ] = None,
    slo_ttft_ms: Annotated[
        float | None, typer.Option(min=0, help="Limit from the scheduled time; default 2000.")
    ] = None,
    slo_tpot_ms: Annotated[float | None, typer.Option(min=0, help="Limit; default 50.")] = None,
    devices: Annotated[int, typer.Option(min=1, help="Devices of the server, for figures per device.")] = 1,
    warmups: Annotated[int, typer.Option(min=0, help="Uncounted requests before each run, one by one.")] = 2,
    timeout: Annotated[float, typer.Option(min=0.001, help="Time limit of a request, in seconds.")] = 600.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of workload and arrivals.")] = 0,
    time_scale: Annotated[float, typer.Option(help="Factor on a trace's times.")] = 1.0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Ask for max_tokens in every answer (vLLM's field).")
    ] = False,
    extra_body: Annotated[
        str, typer.Option(help="JSON object of additional fields, as in '{\"temperature\": 0}'.")
    ] = "{}",
    label: Annotated[str, typer.Option(help="Name of the server in tables.")] = "",
    work_dir: Annotated[Path, typer.Option(help="Parent of the runs' directories.")] = Path("bench"),
    compare: Annotated[
        str, typer.Option(help="Deployment files to start and measure in turn, as in A.yaml,B.yaml.")
    ] = "",
    redraw: Annotated[
        str,
        typer.Option(
            help="Report on the runs in these directories, as in A,B, and send nothing; limits may change."
        ),
    ] = "",
    report: Annotated[bool, typer.Option(help="Write report.html.")] = True,
    fail_on_slo: Annotated[
        bool,
        typer.Option("--fail-on-slo", help="Exit with code 3 if fewer requests than --attainment met the SLO."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summaries as JSON.")] = False,
) -> None:
    """Measure any OpenAI-compatible server: latencies, SLO attainment, goodput.

    The default server is this machine's running deployment. Ctrl-C waits for running requests. OPENAI_API_KEY is
    sent if set.
    """
    from epd_serve.bench.command import Output, redraw_bench, run_bench, slo_of
    from epd_serve.bench.types import SLO, RunSettings

    api_key = os.environ.get("OPENAI_API_KEY") or None
    output = Output(report=report, as_json=as_json, fail_on_slo=fail_on_slo, attainment=attainment)
    if redraw:
        raise typer.Exit(redraw_bench(_paths(redraw), slo_ttft_ms, slo_tpot_ms, output=output))
    if compare and (base_url or deployment):
        raise ValueError("--compare starts the deployments that it measures; name no other server")
    if not compare:
        base_url = server_url(base_url, deployment)
    fields = _fields(extra_body)
    if ignore_eos:
        fields["ignore_eos"] = True
    settings = RunSettings(
        base_url=base_url,
        model=model or "",
        workload=workload,
        num_requests=num_requests,
        seed=seed,
        arrivals=arrivals,
        rate=rate,
        duration_s=duration,
        time_scale=time_scale,
        max_concurrency=max_concurrency,
        slo=slo_of(SLO(), slo_ttft_ms, slo_tpot_ms),
        num_devices=devices,
        num_warmups=warmups,
        timeout_s=timeout,
        fields=fields,
        label=label,
        argv=sys.argv[1:],
    )
    code = run_bench(
        settings,
        work_dir,
        rates=rates,
        goodput=(precision, max_rate) if find_goodput else None,
        compared=_paths(compare),
        api_key=api_key,
        output=output,
    )
    raise typer.Exit(code)


def _paths(text: str) -> list[Path]:
    return [Path(part).expanduser() for part in text.split(",") if part]


def _fields(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--extra-body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError("--extra-body must be a JSON object, as in '{\"temperature\": 0}'")
    return fields
