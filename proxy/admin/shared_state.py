"""A gateway's parts made those of a worker: what it shows the others, and what it takes over from them."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from epd_serve.backends.base import StageCalls
from epd_serve.backends.vllm import VllmInstance
from epd_serve.errors import ServeError
from epd_serve.routing.table import InstanceTable
from epd_serve.types import Role
from proxy.admission.control import AdmissionControl
from proxy.fleet.health import Health
from proxy.fleet.leases import Leases
from proxy.workers.crew import Crew, Drained, Joined, Left, Switched

#: Open calls by instance and stage.
InFlight = dict[str, dict[str, int]]


def follow(
    crew: Crew,
    table: InstanceTable,
    calls: Mapping[str, StageCalls],
    admission: AdmissionControl,
    health: Health,
    leases: Leases,
) -> None:
    """Do what the worker that was told does, and show what those ask for that are asked about all."""

    def drained(change: Drained) -> None:
        with suppress(KeyError):  # it is no part of the deployment any more
            health.drain(change.name, change.on)

    def joined(change: Joined) -> None:
        with suppress(ServeError):  # the deployment file has got one of that name
            leases.join(
                change.name,
                change.url,
                change.deadline_s - time.monotonic(),
                role=change.role,
                incarnation=change.incarnation,
                is_settled=True,
            )

    def left(change: Left) -> None:
        with suppress(ServeError):  # its lease was over
            leases.leave(change.name)

    def hold(name: str, on: bool) -> None:
        with suppress(KeyError):  # it is no part of the deployment any more
            health.hold(name, on)

    def switched(change: Switched) -> None:
        instance = calls.get(change.name)
        if not isinstance(instance, VllmInstance) or instance.url != change.url:
            return
        hold(change.name, change.held_s > 0)
        if change.held_s:  # the worker that switches it may die
            asyncio.get_running_loop().call_later(change.held_s, hold, change.name, False)
        else:
            instance.become(Role.parse(change.role))

    crew.on_drained, crew.on_joined, crew.on_left, crew.on_switched = drained, joined, left, switched
    crew.shown["worker"] = lambda: worker(crew, admission)
    crew.shown["in_flight"] = lambda: in_flight(table)
    crew.shown["requests"] = lambda: requests(admission)


def worker(crew: Crew, admission: AdmissionControl) -> dict[str, int]:
    """This one, for people."""
    index = 0 if crew.setup is None else crew.setup.index
    return {"worker": index, "pid": os.getpid(), "running": admission.queue.num_running}


async def workers_everywhere(crew: Crew, admission: AdmissionControl) -> list[dict[str, int]]:
    """All that answer, in their order."""
    found = [worker(crew, admission), *await crew.ask("worker", dict[str, int])]
    return sorted(found, key=lambda one: one["worker"])


def in_flight(table: InstanceTable) -> InFlight:
    """At this worker."""
    return {
        record.name: {stage.value: count for stage, count in record.in_flight.items() if count} for record in table
    }


async def in_flight_everywhere(crew: Crew, table: InstanceTable) -> InFlight:
    """At all workers."""
    mine = in_flight(table)
    for theirs in await crew.ask("in_flight", InFlight):
        for name, stages in theirs.items():
            if name in mine:
                mine[name] = add(mine[name], stages)
    return mine


def requests(admission: AdmissionControl) -> dict[str, Any]:
    """Count who runs and who waits at this worker, in all and for each API key."""
    queue = admission.queue
    return {
        "running": queue.num_running,
        "waiting": queue.num_waiting,
        "estimated_wait_s": queue.estimated_wait_s(),
        "keys": [
            {"key": client.name, "active": client.num_active, "refused": client.num_refused}
            for client in admission.authenticator.clients
        ],
    }


async def requests_everywhere(crew: Crew, admission: AdmissionControl) -> dict[str, Any]:
    """The same of all workers; the wait is the longest of theirs."""
    parts = [requests(admission), *await crew.ask("requests", dict[str, Any])]
    waits = [part["estimated_wait_s"] for part in parts if part["estimated_wait_s"] is not None]
    keys: dict[str, dict[str, int]] = {}
    for part in parts:
        for key in part["keys"]:
            counts = {what: key[what] for what in ("active", "refused")}
            keys[key["key"]] = add(keys.get(key["key"], {}), counts)
    return {
        "running": sum(part["running"] for part in parts),
        "waiting": sum(part["waiting"] for part in parts),
        "estimated_wait_s": max(waits, default=None),
        "keys": [{"key": name, **counts} for name, counts in keys.items()],
    }


def add(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """Key by key."""
    keys: Iterable[str] = dict.fromkeys((*one, *other))
    return {key: one.get(key, 0) + other.get(key, 0) for key in keys}
