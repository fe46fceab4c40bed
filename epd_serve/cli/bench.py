"""``epd-serve bench``: what is typed and what it means."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from epd_serve.cli.flags import BaseUrl

_WORKLOADS = "sharegpt4o-like, visualwebinstruct-like, synthetic[,KEY=VALUE...], custom:FILE or trace:FILE"


def bench(
    base_url: BaseUrl = "",
    workload: Annotated[str, typer.Option(help=_WORKLOADS)] = "synthetic",
    model: Annotated[str | None, typer.Option(help="Needed where the server has several.")] = None,
    num_requests: Annotated[int, typer.Option(min=0, help="Of each run; 0 for the whole workload.")] = 0,
    duration: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds of requests at each rate, over --num-requests.")
    ] = None,
    arrivals: Annotated[
        str, typer.Option(help="poisson, constant, gamma:SHAPE, trace or closed:CONCURRENCY.")
    ] = "poisson",
    rate: Annotated[
        float | None, typer.Option(help="Requests/s; with --find-goodput the first to be tried.")
    ] = None,
    rates: Annotated[str | None, typer.Option(help="One run for each, as in 1:12:1 or 1,2,4.")] = None,
    find_goodput: Annotated[
        bool, typer.Option("--find-goodput", help="Search the highest rate that attains the SLO.")
    ] = False,
    attainment: Annotated[
        float, typer.Option(min=0.01, max=1, help="Share of requests that must keep the SLO, for the search.")
    ] = 0.9,
    precision: Annotated[float, typer.Option(min=0.001, max=0.5, help="Of the search, relative.")] = 0.05,
    max_rate: Annotated[float, typer.Option(help="The search goes no higher.")] = 1000.0,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Client slots; waiting for one counts as latency.")
    ] = None,
    slo_ttft_ms: Annotated[
        float | None, typer.Option(min=0, help="From the scheduled time; 2000 where nothing else is said.")
    ] = None,
    slo_tpot_ms: Annotated[float | None, typer.Option(min=0, help="50 where nothing else is said.")] = None,
    devices: Annotated[int, typer.Option(min=1, help="Of the server, for figures per device.")] = 1,
    warmups: Annotated[int, typer.Option(min=0, help="Requests before, one by one, not counted.")] = 2,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds for a request.")] = 600.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the workload and of the arrivals.")] = 0,
    time_scale: Annotated[float, typer.Option(help="Of a trace's times.")] = 1.0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Ask for max_tokens in every answer (vLLM's field).")
    ] = False,
    extra_body: Annotated[
        str, typer.Option(help="JSON object of further fields, as in '{\"temperature\": 0}'.")
    ] = "{}",
    label: Annotated[str, typer.Option(help="What tables call the server.")] = "",
    work_dir: Annotated[Path, typer.Option(help="A directory for each run is made in it.")] = Path("bench"),
    compare: Annotated[
        str, typer.Option(help="Deployment files, as in A.yaml,B.yaml: each is brought up in turn and measured.")
    ] = "",
    redraw: Annotated[
        str,
        typer.Option(
            help="Directories of runs, as in A,B: report on all, send nothing; other limits may be given."
        ),
    ] = "",
    report: Annotated[bool, typer.Option(help="Write report.html.")] = True,
    fail_on_slo: Annotated[
        bool, typer.Option("--fail-on-slo", help="Exit code 3 where fewer requests than --attainment were good.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summaries as JSON.")] = False,
) -> None:
    """Measure any OpenAI-compatible server: latencies, SLO attainment, goodput.

    Ctrl-C waits for what is under way. OPENAI_API_KEY is sent where it is set.
    """
    from epd_serve.bench.command import Output, redraw_bench, run_bench, slo_of
    from epd_serve.bench.types import SLO, RunSettings

    api_key = os.environ.get("OPENAI_API_KEY") or None
    output = Output(report=report, as_json=as_json, fail_on_slo=fail_on_slo, attainment=attainment)
    if redraw:
        raise typer.Exit(redraw_bench(_paths(redraw), slo_ttft_ms, slo_tpot_ms, output=output))
    if compare and base_url:
        raise ValueError("--compare brings up what it measures; leave --base-url out")
    if not base_url and not compare:
        raise ValueError("--base-url is missing, as in --base-url http://127.0.0.1:8000")
    fields = _fields(extra_body)
    if ignore_eos:
        fields["ignore_eos"] = True
    settings = RunSettings(
        base_url=base_url.rstrip("/").removesuffix("/v1"),
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
        raise ValueError(f"--extra-body is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError("--extra-body must be a JSON object, as in '{\"temperature\": 0}'")
    return fields
