"""``epd-serve apply``: another deployment file for what runs."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from epd_serve.cli.admin import AdminUrl, ask_admin, choose_gateway
from epd_serve.config import DeploymentConfig, load_config
from epd_serve.config.load import change_config, placed_keys, with_placed_keys
from epd_serve.rpc.admin import AdminClient
from epd_serve.topology.placement import split_host

_LOOK_S = 0.5


def apply(
    file: Annotated[
        Path | None, typer.Argument(help="The new deployment file; without one: what runs, with --topology.")
    ] = None,
    deployment: Annotated[
        str | None,
        typer.Option(
            *("--deployment", "--gateway"),
            metavar="HOST:PORT",
            help="Where several run: its gateway's address, port or file.",
        ),
    ] = None,
    topology: Annotated[str | None, typer.Option(help="Over the file's, as in '2E-P-D'.")] = None,
    topology_only: Annotated[
        bool, typer.Option("--topology-only", help="Of the file, take topology and devices alone.")
    ] = False,
    dry: Annotated[bool, typer.Option("--dry-run", help="Print the steps and take none.")] = False,
    deadline: Annotated[float, typer.Option(min=0.001, max=3600, help="Seconds for each step.")] = 300.0,
    patience: Annotated[
        float,
        typer.Option(min=0, max=3600, help="Seconds for which running answers may end there; then others go on."),
    ] = 1.0,
    admin: AdminUrl = None,
) -> None:
    """Change a running deployment to another file, without a failed request.

    The deployment is one of 'epd-serve up' of the same user on this machine, or one over many hosts whose gateway
    is at --admin. Its instances are switched to other roles where that is possible; the rest is started, and then
    what is left over is drained and stopped. A step that fails ends it; the deployment serves on, and another
    apply goes on from there.

    With --admin, topology, devices, hosts, instances and roles of the new file are written into the gateway's own
    file, which the agents of all hosts follow; --deadline is for all of it, and --patience is 1 s.
    """
    from epd_serve.launch.control import ApplyRequest, ask_launcher
    from epd_serve.launch.layout_choice import choose_layout
    from epd_serve.launch.processes.runtime import find_deployment

    if file is None and topology is None:
        raise ValueError("say what to apply: a deployment file, or --topology")
    config = None if file is None else choose_layout(load_config(file)).config
    if admin is not None:
        _, gateway = choose_gateway(deployment, admin)
        _apply_to_hosts(gateway, config, topology, topology_only=topology_only, dry=dry, deadline_s=deadline)
        return
    address, directory = find_deployment(deployment, (config or DeploymentConfig()).gateway.port)
    steps: list[str] = []

    def say(text: str) -> None:
        steps.append(text)
        typer.echo(text)

    request = ApplyRequest(
        config=None if config is None else config.model_dump(mode="json", exclude_unset=True),
        topology_only=topology_only,
        changes={} if topology is None else {"topology": topology},
        dry_run=dry,
        deadline_s=deadline,
        patience_s=patience,
    )
    asyncio.run(ask_launcher(directory.control, request, say))
    if all(text.startswith("note: ") for text in steps):
        typer.echo("no instance has to change")
    if not dry:
        typer.echo(f"the deployment at {address} is what was asked for")


_Roles = Mapping[str, Counter[str]]


def _apply_to_hosts(
    gateway: AdminClient,
    file: DeploymentConfig | None,
    topology: str | None,
    *,
    topology_only: bool,
    dry: bool,
    deadline_s: float,
) -> None:
    """Change the gateway's file, and return when each host has what it says."""
    running = with_placed_keys(DeploymentConfig(), ask_admin(gateway, "GET", "/deployment")["keys"])
    if not running.hosts:
        raise ValueError(f"{gateway.where} has no hosts in its file; --admin is for many hosts, leave it out")
    wanted = running
    if file is not None:
        wanted = _topology_of(file, running) if topology_only else with_placed_keys(running, placed_keys(file))
    if topology is not None:
        wanted = change_config(wanted, {"topology": topology})
    before, after = _roles_in(running), _roles_in(wanted)
    for host in {**before, **after}:
        old, new = _listed(before.get(host, Counter())), _listed(after.get(host, Counter()))
        typer.echo(f"{host}: {old}" if old == new else f"{host}: {old} -> {new}")
    if dry:
        return
    ask_admin(gateway, "PUT", "/deployment", placed_keys(wanted))
    until, shown = time.monotonic() + deadline_s, before
    while (now := _roles_ready(gateway)) != after:
        for host in sorted(now.keys() | shown.keys()):
            if now.get(host) != shown.get(host):
                typer.echo(f"{host} has {_listed(now.get(host, Counter()))}")
        shown = now
        if time.monotonic() > until:
            late = ", ".join(host for host in sorted({**now, **after}) if now.get(host) != after.get(host))
            raise ValueError(
                f"after {deadline_s:g} s {late} is not as the file has it, and goes on trying; why: "
                f"epd-serve logs {late.partition(',')[0]}-agent --admin {gateway.where}"
            )
        time.sleep(_LOOK_S)
    typer.echo(f"the deployment at {gateway.where} is what was asked for")


def _topology_of(file: DeploymentConfig, running: DeploymentConfig) -> DeploymentConfig:
    """The instances that run with a file's topology; with its devices too where they name hosts.

    A plan's devices name none: then they must be of the kinds that the hosts list, in their order.
    """
    devices = file.devices
    if not file.hosts:
        devices = running.devices
        kinds = [_kind(device) for device in running.devices][: file.topology.num_devices]
        if [_kind(device) for device in file.devices][: len(kinds)] != kinds:
            raise ValueError(
                f"the file has other kinds of devices than the hosts, in their order {', '.join(running.devices)}"
            )
    return change_config(running, {"topology": str(file.topology), "devices": list(devices)})


def _kind(device: str) -> str:
    return split_host(device)[1].rpartition(":")[0]


def _roles_in(config: DeploymentConfig) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for one in config.placement():
        found.setdefault(one.host, Counter())[str(one.role)] += 1
    return found


def _roles_ready(gateway: AdminClient) -> dict[str, Counter[str]]:
    """The roles of the instances that are there, by the hosts in their names (launch/remote/part.py)."""
    found: dict[str, Counter[str]] = {}
    for one in ask_admin(gateway, "GET", "/instances")["instances"]:
        if one["ready"]:
            found.setdefault(one["name"].rpartition("-")[0], Counter())[one["role"]] += 1
    return found


def _listed(roles: Counter[str]) -> str:
    return " ".join(f"{count}{role}" if count > 1 else role for role, count in sorted(roles.items())) or "nothing"
