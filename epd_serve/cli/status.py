"""``epd-serve status``: the instances and requests of a running deployment."""

from __future__ import annotations

from typing import Any

import typer

from epd_serve.cli.admin import AdminUrl, Deployment, ask_admin, choose_gateway
from epd_serve.config.sizes import in_binary_units

_COLUMNS = ("instance", "role", "state", "device", "in flight", "waiting", "at most")


def status(deployment: Deployment = None, admin: AdminUrl = None) -> None:
    """Show each instance of a running deployment, and the number of requests.

    It is the deployment that runs on this machine, or the gateway at --admin, whose key is read from
    EPD_SERVE_ADMIN_KEY.
    """
    name, gateway = choose_gateway(deployment, admin)
    shown = ask_admin(gateway, "GET", "/instances")
    instances = shown["instances"]
    requests = ask_admin(gateway, "GET", "/requests")
    counts = f"{requests['running']} requests running, {requests['waiting']} waiting"
    typer.echo(f"{name}, engine {shown['engine']}: {counts}")
    rows = [_COLUMNS, *(_row(one) for one in instances)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _row(instance: dict[str, Any]) -> tuple[str, ...]:
    load = instance["load"] or {}
    waiting = load.get("num_waiting", 0) + load.get("num_waiting_encodes", 0)
    return (
        instance["name"],
        instance["role"] or "?",
        "ready" if instance["ready"] else "not ready",
        instance["device"] or "?",
        str(sum(instance["in_flight"].values())),
        str(waiting),
        _sizes(instance["role"] or "", instance.get("budgets", {})),
    )


def _sizes(role: str, budgets: dict[str, Any]) -> str:
    """Sizes of a step of a language model and of the features that E keeps for P, or P has got."""
    parts = []
    if set(role) & set("PD"):
        sizes = (("max_num_seqs", "sequences"), ("max_num_batched_tokens", "tokens"))
        parts += [f"{budgets[key]:g} {unit}" for key, unit in sizes if key in budgets]
    if set(role) & set("EP") and "feature_cache_bytes" in budgets:
        parts.append(f"{in_binary_units(int(budgets['feature_cache_bytes']))} of features")
    return ", ".join(parts)
