"""The ``epd-serve`` command."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from epd_serve.apply_command import apply
from epd_serve.bench_command import bench
from epd_serve.config import (
    DEMO_MODEL,
    DeploymentConfig,
    InstanceOptions,
    change_config,
    deployment_schema,
    load_config,
    model_path,
)
from epd_serve.config.options import (
    BatchingEncodes,
    BatchingOrder,
    BatchingPolicy,
    DType,
    FeaturePrefetch,
    FeatureStoreKind,
    KVTransport,
    MooncakeProtocol,
    Switch,
)
from epd_serve.cost_command import cost
from epd_serve.errors import needs_native
from epd_serve.interference_command import interference
from epd_serve.key_command import key_app
from epd_serve.launch.ports import instance_urls, name_and_url
from epd_serve.plan_command import plan
from epd_serve.profile_command import profile
from epd_serve.switch_command import switch
from epd_serve.topology import draw, explain, parse_topology
from epd_serve.trace_command import trace
from epd_serve.types import KVMode, Role

app = typer.Typer(
    name="epd-serve",
    help="Serve multimodal LLMs as separate Encode, Prefill and Decode instances behind one OpenAI API.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(key_app, name="key")

ParentPid = Annotated[
    int | None, typer.Option(help="End when this process, the starter of this one, ends.", hidden=True)
]
Host = Annotated[str | None, typer.Option(help="Address of the gateway; over the file's.")]
Port = Annotated[
    int | None, typer.Option(min=0, max=65535, help="Port of the gateway, 0 for a free one; over the file's.")
]


@app.command()
def up(
    file: Annotated[
        Path | None, typer.Argument(help="Deployment file; without one: the demo model as E-P-D on the CPU.")
    ] = None,
    host: Host = None,
    port: Port = None,
    topology: Annotated[str | None, typer.Option(help="Over the file's, as in '(E-P)-D'.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Over the file's: 'demo' or a transformers model directory.")
    ] = None,
    dry: Annotated[
        bool, typer.Option("--dry-run", help="Print every command line and its environment; start nothing.")
    ] = False,
) -> None:
    """Start a deployment on this machine and stay until Ctrl-C."""
    from epd_serve.launch.progress import Terminal
    from epd_serve.launch.up import run_up

    gateway = {key: value for key, value in (("host", host), ("port", port)) if value is not None}
    changes: dict[str, Any] = {"gateway": gateway} if gateway else {}
    if topology is not None:
        changes["topology"] = topology
    if model is not None:  # relative to where the user stands, not to the file
        changes["model"] = model if model == DEMO_MODEL else str(Path(model).expanduser().resolve())
    config = change_config(load_config(file) if file else DeploymentConfig(), changes)
    if dry:
        from epd_serve.launch.dry_run import dry_run

        for line in dry_run(config, file, os.environ):
            typer.echo(line)
        return
    raise typer.Exit(asyncio.run(run_up(config, Terminal())))


@app.command()
def proxy(
    config: Annotated[Path | None, typer.Option(help="Deployment file; its gateway section is used.")] = None,
    instance: Annotated[
        list[str] | None, typer.Option(metavar="NAME=URL", help="An instance; once for each.")
    ] = None,
    host: Host = None,
    port: Port = None,
    control: Annotated[
        bool, typer.Option("--control", help="Run the controller of 'elastic'; in one gateway of a deployment.")
    ] = False,
    orders: Annotated[Path | None, typer.Option(help="Socket for the launcher's orders.", hidden=True)] = None,
    parent_pid: ParentPid = None,
    worker: Annotated[str | None, typer.Option(help="One of gateway.workers.", hidden=True)] = None,
) -> None:
    """Run the gateway alone, in front of instances that were started by themselves.

    Without --instance they are taken from the deployment file: as many as its topology has, from its
    instances.base_port on.
    """
    _tie_to(parent_pid)
    from proxy.workers.place import WorkerPlace

    place = WorkerPlace.parse(worker) if worker else None
    deployment = place.deployment() if place else load_config(config) if config else DeploymentConfig()

    def instances_of(deployment: DeploymentConfig) -> list[tuple[str, str]]:
        return [name_and_url(text) for text in instance or ()] or instance_urls(deployment)

    instances = instances_of(deployment)
    names = [name for name, _ in instances]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"instance {', '.join(sorted(twice))} is named twice; names must differ")
    address = (host or deployment.gateway.host, deployment.gateway.port if port is None else port)
    if place is None and deployment.gateway.workers > 1:
        from proxy.workers.parent import run_workers

        raise typer.Exit(run_workers(deployment, *address, sys.argv[1:], reloads=config is not None))
    from proxy.main import Reread, run_gateway

    reread = Reread(lambda: load_config(config), config, instances_of) if config else None
    code = run_gateway(deployment, instances, *address, reread, controls=control, place=place, orders=orders)
    if code:
        raise typer.Exit(code)


@app.command()
def instance(
    name: Annotated[str, typer.Option(help="Unique in the deployment, as in e0.")],
    role: Annotated[str, typer.Option(help="Stages of the instance: E, P, D, EP, ED, PD or EPD.")],
    model: Annotated[str, typer.Option(help="'demo' or a transformers model directory.")] = "demo",
    served_model_name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    host: Annotated[str, typer.Option(help="Address of the control server.")] = InstanceOptions.host,
    port: Annotated[int, typer.Option(min=1, max=65535)] = InstanceOptions.port,
    device: Annotated[
        str, typer.Option(help="cpu, cuda:0 ...; several, as in cuda:0,cuda:1, are tensor-parallel.")
    ] = InstanceOptions.device,
    dtype: Annotated[DType, typer.Option(help="auto: the model's own.")] = InstanceOptions.dtype,
    generation_config: Annotated[
        str, typer.Option(help="Sampling that requests leave open: auto (the model's), off or a directory.")
    ] = InstanceOptions.generation_config,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    share: Annotated[
        float | None, typer.Option(min=0.001, max=1, help="Part of the device; no limit when absent.")
    ] = None,
    share_start: Annotated[
        float, typer.Option(min=0, max=1, help="Where that part begins.")
    ] = InstanceOptions.share_start,
    memory_share: Annotated[
        float | None,
        typer.Option(min=0.001, max=1, help="Part of an accelerator's memory; as --share when absent."),
    ] = None,
    stream_priority: Annotated[
        int, typer.Option(min=-5, max=19, help="Of the tower's stream: lower is first. On a CPU its niceness.")
    ] = InstanceOptions.stream_priority,
    device_board: Annotated[
        str | None, typer.Option(help="PATH:SLOT of the file that instances on one device share.")
    ] = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="Tokens; 128 on an NPU, else 16.")] = None,
    num_blocks: Annotated[int | None, typer.Option(min=1, help="KV blocks.")] = None,
    kv_cache_bytes: Annotated[int | None, typer.Option(min=1, help="Instead of --num-blocks.")] = None,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="Token budget of a step.")
    ] = InstanceOptions.max_num_batched_tokens,
    max_num_seqs: Annotated[
        int, typer.Option(min=1, help="Most sequences in a step.")
    ] = InstanceOptions.max_num_seqs,
    async_scheduling: Annotated[Switch, typer.Option(help="Launch early.")] = InstanceOptions.async_scheduling,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Longest prompt and answer, in tokens.")] = None,
    image_budget_pixels: Annotated[
        int, typer.Option(min=1, help="Most pixels encoded in a step.")
    ] = InstanceOptions.image_budget_pixels,
    feature_store_bytes: Annotated[
        int, typer.Option(min=1, help="Encoder output that E keeps.")
    ] = InstanceOptions.feature_store_bytes,
    feature_cache_bytes: Annotated[int, typer.Option(min=1, help="Of P.")] = InstanceOptions.feature_cache_bytes,
    feature_batch: Annotated[int, typer.Option(min=1, help="Handed over together.")] = 1,
    feature_batch_ms: Annotated[float, typer.Option(help="To fill one.")] = InstanceOptions.feature_batch_ms,
    media_cpu_s: Annotated[
        float, typer.Option(min=0.001, help="CPU time that decoding one picture may take.")
    ] = InstanceOptions.media_cpu_s,
    feature_timeout_s: Annotated[
        float, typer.Option(min=0.001, help="How long P waits for a feature.")
    ] = InstanceOptions.feature_timeout_s,
    queue_timeout_s: Annotated[
        float, typer.Option(min=0.001, help="How long a request waits for room in D's KV cache.")
    ] = InstanceOptions.queue_timeout_s,
    lease_s: Annotated[
        float, typer.Option(min=0.001, help="How long unconfirmed memory is kept.")
    ] = InstanceOptions.lease_s,
    drain_s: Annotated[
        float, typer.Option(min=0.001, help="How long requests may go on after SIGTERM.")
    ] = InstanceOptions.drain_s,
    kv_transport: Annotated[KVTransport, typer.Option(help="From P to D.")] = InstanceOptions.kv_transport,
    feature_store: Annotated[FeatureStoreKind, typer.Option(help="Of E.")] = InstanceOptions.feature_store,
    mooncake_master: Annotated[
        str | None, typer.Option(help="host:port of the master, for --feature-store mooncake.")
    ] = None,
    mooncake_protocol: Annotated[
        MooncakeProtocol, typer.Option(help="auto: tcp, and ascend on an NPU.")
    ] = InstanceOptions.mooncake_protocol,
    mooncake_devices: Annotated[str | None, typer.Option(help="RDMA devices, as in mlx5_0,mlx5_1.")] = None,
    mooncake_staging_bytes: Annotated[
        int, typer.Option(min=1, help="Registered memory for bytes that lie elsewhere.")
    ] = InstanceOptions.mooncake_staging_bytes,
    kv_mode: Annotated[KVMode, typer.Option(help="What KV is sent when.")] = InstanceOptions.kv_mode,
    kv_group_layers: Annotated[int | None, typer.Option(min=1, help="Sent together; else chosen.")] = None,
    feature_prefetch: Annotated[
        FeaturePrefetch, typer.Option(help="Fetch features when announced (async) or needed (sync).")
    ] = InstanceOptions.feature_prefetch,
    slo_ttft_ms: Annotated[float | None, typer.Option(help="Longest time to first token.")] = None,
    slo_tpot_ms: Annotated[float | None, typer.Option(help="Longest time between two tokens.")] = None,
    batching_alpha: Annotated[
        float, typer.Option(help="Share of --slo-ttft-ms for a step, where nothing is decoded.")
    ] = InstanceOptions.batching_alpha,
    batching_order: Annotated[BatchingOrder, typer.Option(help="Of prompts.")] = InstanceOptions.batching_order,
    batching_policy: Annotated[
        BatchingPolicy, typer.Option(help="Bound steps by the SLO, or not.")
    ] = InstanceOptions.batching_policy,
    batching_encodes: Annotated[
        BatchingEncodes, typer.Option(help="Start encodes while prompts are computed, or after.")
    ] = InstanceOptions.batching_encodes,
    steals: Annotated[bool, typer.Option("--steals", help="Encode first; take prompts from others.")] = False,
    link_bandwidth: Annotated[
        int | None, typer.Option(min=1, help="Bytes per second of links between instances, for experiments.")
    ] = None,
    link_latency_ms: Annotated[
        float, typer.Option(min=0, help="What each transfer takes besides, for experiments.")
    ] = InstanceOptions.link_latency_ms,
    switch_dir: Annotated[Path | None, typer.Option(help="Directory in which its role is kept.")] = None,
    join: Annotated[
        str | None, typer.Option(metavar="URL", help="Admin plane of a gateway to join; key: EPD_SERVE_ADMIN_KEY.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Directory for a trace of what it does.")] = None,
    parent_pid: ParentPid = None,
) -> None:
    """Run one instance; 'epd-serve up' starts these."""
    _tie_to(parent_pid)
    if num_blocks is not None and kv_cache_bytes is not None:
        raise ValueError("--num-blocks and --kv-cache-bytes set the same thing; give one of them")
    if feature_store == "mooncake" and mooncake_master is None:
        raise ValueError("--feature-store mooncake needs --mooncake-master HOST:PORT")
    if batching_order == "slack" and slo_ttft_ms is None:
        raise ValueError("--batching-order slack needs --slo-ttft-ms")
    options = InstanceOptions(
        name=name,
        role=Role.parse(role),
        model=model_path(model),
        served_model_name=served_model_name or DeploymentConfig(model=model).model_name,
        host=host,
        port=port,
        device=device,
        dtype=dtype,
        generation_config=generation_config,
        threads=threads,
        share=share,
        share_start=share_start,
        memory_share=memory_share,
        stream_priority=stream_priority,
        device_board=device_board,
        block_size=block_size,
        num_blocks=num_blocks,
        kv_cache_bytes=kv_cache_bytes,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        async_scheduling=async_scheduling,
        max_model_len=max_model_len,
        image_budget_pixels=image_budget_pixels,
        feature_store_bytes=feature_store_bytes,
        feature_cache_bytes=feature_cache_bytes,
        feature_batch=feature_batch,
        feature_batch_ms=feature_batch_ms,
        media_cpu_s=media_cpu_s,
        feature_timeout_s=feature_timeout_s,
        queue_timeout_s=queue_timeout_s,
        lease_s=lease_s,
        drain_s=drain_s,
        kv_transport=kv_transport,
        feature_store=feature_store,
        mooncake_master=mooncake_master,
        mooncake_protocol=mooncake_protocol,
        mooncake_devices=mooncake_devices,
        mooncake_staging_bytes=mooncake_staging_bytes,
        kv_mode=kv_mode,
        kv_group_layers=kv_group_layers,
        feature_prefetch=feature_prefetch,
        slo_ttft_ms=slo_ttft_ms,
        slo_tpot_ms=slo_tpot_ms,
        batching_alpha=batching_alpha,
        batching_order=batching_order,
        batching_policy=batching_policy,
        batching_encodes=batching_encodes,
        steals=steals,
        link_bandwidth=link_bandwidth,
        link_latency_ms=link_latency_ms,
        switch_dir=switch_dir,
        join=join,
        trace=trace,
    )
    with needs_native():
        from epd_serve.instance.main import end_process, run_instance
    run_instance(options)
    end_process()


@app.command()
def topology(text: Annotated[str, typer.Argument(help="As in '(E-P)-D'; quote it for the shell.")]) -> None:
    """Draw a topology and say in plain words what runs where."""
    parsed = parse_topology(text)
    typer.echo(f"{parsed}\n\n{draw(parsed)}\n")
    for sentence in explain(parsed):
        typer.echo(sentence)


@app.command()
def devices(
    check: Annotated[
        bool, typer.Option("--check", help="Test each device; exit code 1 where something is wrong.")
    ] = False,
    vllm: Annotated[
        Path | None, typer.Option(help="With --check: the Python that engine: vllm would use; this one if absent.")
    ] = None,
) -> None:
    """List the devices of this machine, what each can do, and why one is missing."""
    from epd_serve.devices import check_devices, show_devices

    console = Console()
    reports = show_devices(console)
    if check:
        from epd_serve.launch.vllm_check import check_vllm_engine

        passed = [check_devices(console, reports), check_vllm_engine(console, vllm)]
        if not all(passed):
            raise typer.Exit(1)


app.command()(apply)
app.command()(interference)
app.command()(bench)
app.command()(cost)
app.command()(plan)
app.command()(profile)
app.command()(switch)
app.command()(trace)


@app.command()
def schema() -> None:
    """Print the JSON schema of deployment files, for editors."""
    typer.echo(json.dumps(deployment_schema(), indent=2))


@app.command()
def version() -> None:
    """Print the version."""
    from epd_serve import __version__

    typer.echo(f"epd-serve {__version__}")


def main() -> None:
    """A user's mistake is one line on stderr and exit code 2; EPD_SERVE_TRACEBACK=1 shows where it was found."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 shows "?" for what it lacks
    try:
        app()
    except ValueError as error:
        if os.environ.get("EPD_SERVE_TRACEBACK") == "1":
            raise
        print(f"epd-serve: {error}", file=sys.stderr)
        sys.exit(2)


def _tie_to(parent_pid: int | None) -> None:
    if parent_pid is not None:
        from epd_serve.lifeline import die_with_parent

        die_with_parent(parent_pid)


if __name__ == "__main__":
    main()
