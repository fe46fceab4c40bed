"""``/dashboard``: the deployment live, as one page without any other file; ``/dashboard/data``: what it shows."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, Request, Response

from epd_serve.protocol.addresses import cross_site
from epd_serve.routing.table import InstanceRecord, InstanceTable
from epd_serve.topology.draw import sends_features, sends_kv
from epd_serve.topology.notation import Topology
from epd_serve.topology.placement import place_units
from proxy.admission.control import AdmissionControl
from proxy.api.views import key_required, kv_usage, pending_s
from proxy.observe.access_log import stages
from proxy.observe.figures import Second
from proxy.observe.observer import Observer
from proxy.observe.record import RequestRecord
from proxy.workers.crew import Crew

_NUM_REQUESTS = 30
_PAGE = Path(__file__).with_name("dashboard.html")
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@cache
def page() -> tuple[bytes, str]:
    """The page and its Content-Security-Policy: its own script and style by their hashes, calls home, no more."""
    text = _PAGE.read_text(encoding="utf-8")
    hashes: dict[str, str] = {}
    for kind, content in _INLINE.findall(text):
        hashes[kind] = base64.b64encode(sha256(content.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{hashes['script']}'; style-src 'sha256-{hashes['style']}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), policy


def dashboard_router(
    table: InstanceTable,
    observer: Observer,
    admission: AdmissionControl,
    crew: Crew,
    topology: Callable[[], Topology | None] = lambda: None,
    *,
    is_local: bool = False,
) -> APIRouter:
    """The page is open to all and shows nothing by itself; its data ask for an API key where there are any.
    Without keys, no page of another site may read them; ``is_local``: the gateway listens on loopback.

    The page asks its user for the key then, and keeps it for as long as the tab is open (sessionStorage).
    """
    router = APIRouter(include_in_schema=False)
    crew.shown["dashboard"] = lambda: part_of(table, observer, admission)
    check_key = key_required(admission.authenticator)

    async def guard(request: Request) -> None:
        await check_key(request)
        if admission.authenticator.is_open and (
            problem := cross_site(request.scope["headers"], is_local=is_local)
        ):
            raise problem

    @router.get("/dashboard")
    async def dashboard() -> Response:
        text, policy = page()
        headers = {
            "content-security-policy": policy,
            "cache-control": "no-cache",
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
        }
        return Response(text, media_type="text/html; charset=utf-8", headers=headers)

    @router.get("/dashboard/data", dependencies=[Depends(guard)])
    async def data() -> Response:
        shown = snapshot(table, observer, admission, topology(), await crew.ask("dashboard", Part))
        return Response(
            msgspec.json.encode(shown), media_type="application/json", headers={"cache-control": "no-store"}
        )

    return router


class Part(msgspec.Struct, kw_only=True):
    """The part of the page that one worker knows."""

    running: int
    waiting: int
    in_flight: dict[str, int]
    seconds: list[Second]
    requests: list[dict[str, Any]]


def part_of(table: InstanceTable, observer: Observer, admission: AdmissionControl) -> Part:
    """As of now."""
    now_s, figures = time.monotonic(), observer.figures
    return Part(
        running=admission.queue.num_running,
        waiting=admission.queue.num_waiting,
        in_flight={record.name: sum(record.in_flight.values()) for record in table},
        seconds=list(figures.seconds),
        requests=[_request(record, now_s) for record in figures.latest(_NUM_REQUESTS)],
    )


def snapshot(
    table: InstanceTable,
    observer: Observer,
    admission: AdmissionControl,
    topology: Topology | None = None,
    others: Sequence[Part] = (),
) -> dict[str, Any]:
    """Everything that the page shows, as of now, with the parts of ``others``. Times of requests count back from
    now, in milliseconds."""
    now_s = time.monotonic()
    records = list(table)
    parts = [part_of(table, observer, admission), *others]
    figures = observer.figures.with_others(other.seconds for other in others) if others else observer.figures
    requests = sorted((one for part in parts for one in part.requests), key=lambda one: float(one["ended_ms_ago"]))
    return {
        "version": version("epd-serve"),
        "uptime_s": round(now_s - observer.started_s, 1),
        "topology": None if topology is None else str(topology),
        "models": list(table.models()),
        "missing": [stage.value for stage in table.missing_stages()],
        "running": sum(part.running for part in parts),
        "waiting": sum(part.waiting for part in parts),
        "series": figures.series(now_s),
        "window": figures.window(now_s, min(60, max(1, round(now_s - observer.started_s)))),
        "units": _units(table, topology),
        "instances": [
            _instance(record, sum(part.in_flight.get(record.name, 0) for part in parts)) for record in records
        ],
        "links": [
            {"kind": kind, "source": source.name, "target": target.name}
            for source in records
            for target in records
            if source is not target and source.role is not None and target.role is not None
            for kind, sends in (("features", sends_features), ("kv", sends_kv))
            if sends(source.role, target.role)
        ],
        "requests": requests[:_NUM_REQUESTS],
    }


def _instance(record: InstanceRecord, in_flight: int) -> dict[str, Any]:
    info, load = record.info, record.load
    return {
        "name": record.name,
        "role": None if record.role is None else str(record.role),
        "state": _state(record),
        "model": None if info is None else info.model,
        "device": None if info is None else info.device,
        "running": load.num_running,
        "waiting": load.num_waiting + load.num_waiting_encodes,
        "in_flight": in_flight,
        "pending_ms": {stage.value: round(1e3 * seconds, 2) for stage, seconds in pending_s(record).items()},
        "kv_usage": kv_usage(record),
    }


def _state(record: InstanceRecord) -> str:
    """ "held": it answers and gets no work: it is drained, or its breaker is open."""
    if not record.ready:
        return "lost"
    return "held" if not record.accepting else "stale" if record.is_stale else "ready"


def _request(record: RequestRecord, now_s: float) -> dict[str, Any]:
    """Without what other clients should not see of it: whole ids and names of keys."""

    def ms(seconds: float | None) -> float | None:
        return None if seconds is None else round(1e3 * seconds, 2)

    return {
        "id": record.context.trace_id[:8],
        "endpoint": record.endpoint,
        "modality": record.modality,
        "images": record.num_images,
        "status": record.status,
        "ended_ms_ago": ms(now_s - (record.end_s or now_s)),
        "ms": ms(record.duration_s),
        "ttft_ms": ms(record.ttft_s),
        "tpot_ms": ms(record.tpot_s),
        "prompt_tokens": record.prompt_tokens,
        "tokens": record.output_tokens,
        "retries": record.retries + record.continuations,
        "stages": [msgspec.structs.replace(stage, item="") for stage in stages(record)],
    }


def _units(table: InstanceTable, topology: Topology | None) -> list[dict[str, Any]]:
    """Instances by the devices that they share: as the topology has them, else each by itself."""
    names = [record.name for record in table]
    if topology is not None:
        devices = [f"device {index}" for index in range(topology.num_devices)]
        placed = [
            {"title": _title(replica), "instances": [instance.name for instance in replica]}
            for replicas in place_units(topology, devices)
            for replica in replicas
        ]
        if sorted(name for unit in placed for name in unit["instances"]) == sorted(names):
            return placed
    return [{"title": "", "instances": [name]} for name in names]


def _title(replica: Any) -> str:
    return ", ".join(dict.fromkeys(device for instance in replica for device in instance.devices))
