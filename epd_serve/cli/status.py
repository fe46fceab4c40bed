"""``epd-serve status``: the instances and requests of a running deployment."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from typing import Annotated, Any, Literal

import typer

from epd_serve.cli.admin import AdminUrl, Deployment, ask_admin, choose_gateway
from epd_serve.config.sizes import in_binary_units

_COLUMNS = ("name", "role", "state", "device", "pid", "restarts", "memory", "in flight", "waiting")
_WATCH_S = 2.0


def status(
    deployment: Deployment = None,
    admin: AdminUrl = None,
    output: Annotated[Literal["table", "json"], typer.Option("--output", "-o", help="Output format.")] = "table",
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every 2 s until Ctrl-C.")] = False,
) -> None:
    """Show each instance of a running deployment, and the number of requests.

    The default deployment is this machine's. With --admin, EPD_SERVE_ADMIN_KEY holds the gateway's admin key.
    """
    name, gateway = choose_gateway(deployment, admin)
    while True:
        shown = ask_admin(gateway, "GET", "/instances")
        requests = ask_admin(gateway, "GET", "/requests")
        text = _table(name, shown, requests)
        if output == "json":
            text = json.dumps({"deployment": name, **shown, "requests": requests})
        elif watch:
            typer.echo("\x1b[H\x1b[2J", nl=False)  # typer strips it unless stdout is a terminal
        typer.echo(text)
        if not watch:
            return
        time.sleep(_WATCH_S)


def _table(name: str, shown: dict[str, Any], requests: dict[str, Any]) -> str:
    counts = f"{requests['running']} requests running, {requests['waiting']} waiting"
    models = ", ".join(shown["models"]) or "no model yet"
    rows = [_COLUMNS, *map(_row, shown["instances"])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    title = f"{name}: {models} as {shown['topology'] or 'no topology'}, engine {shown['engine']}; {counts}"
    return "\n".join((title, *lines, *_list_sizes(shown["instances"])))


def _row(instance: dict[str, Any]) -> tuple[str, ...]:
    load = instance["load"] or {}
    waiting = load.get("num_waiting", 0) + load.get("num_waiting_encodes", 0)
    return (
        instance["name"],
        instance["role"] or "?",
        "ready" if instance["ready"] else "not ready",
        instance["device"] or "?",
        str(instance["pid"] or "?"),
        str(instance["restarts"]),
        in_binary_units(memory) if (memory := instance["memory_bytes"]) else "?",
        str(sum(instance["in_flight"].values())),
        str(waiting),
    )


def _list_sizes(instances: list[dict[str, Any]]) -> list[str]:
    """Return a line for each distinct size, which names its instances."""
    names = defaultdict(list)
    for instance in instances:
        names[_sizes(instance["role"] or "", instance.get("budgets", {}))].append(instance["name"])
    return [f"at most {sizes}: {', '.join(named)}" for sizes, named in names.items() if sizes]


def _sizes(role: str, budgets: dict[str, Any]) -> str:
    """Return the step sizes of a language model, and the feature cache of E or P."""
    parts = []
    if set(role) & set("PD"):
        sizes = (("max_num_seqs", "sequences"), ("max_num_batched_tokens", "tokens"))
        parts += [f"{budgets[key]:g} {unit}" for key, unit in sizes if key in budgets]
    if set(role) & set("EP") and "feature_cache_bytes" in budgets:
        parts.append(f"{in_binary_units(int(budgets['feature_cache_bytes']))} of features")
    return ", ".join(parts)
