"""``/dashboard``: the deployment live, as one page without any other file; ``/dashboard/data``: what it shows."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, Request, Response

from epd_serve.config.sections import SLOConfig
from epd_serve.protocol.addresses import cross_site
from epd_serve.protocol.instance_state import Usage
from epd_serve.routing.table import InstanceRecord, InstanceTable
from epd_serve.topology.draw import sends_features, sends_kv
from epd_serve.topology.notation import Topology
from epd_serve.topology.placement import place_units
from epd_serve.types import Stage
from proxy.admission.control import AdmissionControl
from proxy.api.views import key_required
from proxy.observe.access_log import stages
from proxy.observe.figures import RANGES_S, series, window
from proxy.observe.metrics import kv_usage, pending_s
from proxy.observe.observer import Observer
from proxy.observe.record import RequestRecord

_NUM_REQUESTS = 30
#: A stage that is used beyond this part holds up the others.
_SATURATED = 0.8
_NAMES = {Stage.ENCODE: "encode", Stage.PREFILL: "prefill", Stage.DECODE: "decode"}
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
    topology: Callable[[], Topology | None] = lambda: None,
    *,
    slo: SLOConfig | None = None,
    is_local: bool = False,
    engine: str = "native",
) -> APIRouter:
    """The page is open to all and shows nothing by itself; its data ask for an API key where there are any.
    Without keys, no page of another site may read them; ``is_local``: the gateway listens on loopback.

    The page asks its user for the key then, and keeps it for as long as the tab is open (sessionStorage).
    """
    router = APIRouter(include_in_schema=False)
    check_key = key_required(admission.authenticator)

    async def guard(request: Request) -> None:
        await check_key(request)
        if admission.authenticator.anonymous and (
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
    async def data(range_s: int = 60) -> Response:
        shown = snapshot(table, observer, admission, topology(), slo=slo, range_s=range_s)
        shown["engine"] = engine
        return Response(
            msgspec.json.encode(shown), media_type="application/json", headers={"cache-control": "no-store"}
        )

    return router


def snapshot(
    table: InstanceTable,
    observer: Observer,
    admission: AdmissionControl,
    topology: Topology | None = None,
    *,
    slo: SLOConfig | None = None,
    range_s: int = 60,
) -> dict[str, Any]:
    """Everything that the page shows, as of now. Times of requests count back from now, in milliseconds.

    Args:
        range_s: the seconds that are looked back, one of :data:`~proxy.observe.figures.RANGES_S`; else the least.
    """
    now_s = time.monotonic()
    range_s = range_s if range_s in RANGES_S else min(RANGES_S)
    width, limits = RANGES_S[range_s], slo or SLOConfig()
    records = list(table)
    slots = observer.figures.slots()[width]
    return {
        "version": version("epd-serve"),
        "uptime_s": round(now_s - observer.started_s, 1),
        "topology": None if topology is None else str(topology),
        "models": list(table.models()),
        "missing": [stage.value for stage in table.missing_stages()],
        "running": admission.queue.num_running,
        "waiting": admission.queue.num_waiting,
        "slo": {"ttft_ms": limits.ttft_ms, "tpot_ms": limits.tpot_ms},
        "range_s": range_s,
        "series": series(slots, width, now_s),
        "window": window(slots, width, now_s, min(range_s, max(1, round(now_s - observer.started_s)))),
        "bottleneck": bottleneck(records),
        "units": _units(table, topology),
        "instances": [_instance(record) for record in records],
        "links": [
            {"kind": kind, "source": source.name, "target": target.name}
            for source in records
            for target in records
            if source is not target and source.role is not None and target.role is not None
            for kind, sends in (("features", sends_features), ("kv", sends_kv))
            if sends(source.role, target.role)
        ],
        "requests": [_request(record, now_s) for record in observer.figures.latest(_NUM_REQUESTS)],
    }


def bottleneck(records: Sequence[InstanceRecord]) -> str:
    """A sentence that names the stage which holds up the others, or the one that is used most."""
    used: dict[Stage, tuple[float, str]] = {}
    for stage in Stage:
        parts = [
            (part, one.name) for one in records if one.ready and stage in one.stages for part in _part(one, stage)
        ]
        if parts:
            mean = sum(part for part, _ in parts) / len(parts)
            used[stage] = mean, max(parts)[1]
    if not used:
        return ""
    stage = max(used, key=lambda one: used[one][0])
    part, name = used[stage]
    percent = f"{100 * part:.0f} %"
    if part < _SATURATED:
        of = "its places or its KV cache" if stage is Stage.DECODE else "the time"
        return f"No stage holds up the others. Used most: {_NAMES[stage]}, {percent} of {of}."
    ahead_s = max(pending_s(one).get(stage, 0.0) for one in records if one.ready)
    waiting = f", and {1e3 * ahead_s:.0f} ms of work wait" if ahead_s >= 0.001 else ""
    most = f", {name} most" if sum(one.ready and stage in one.stages for one in records) > 1 else ""
    if stage is Stage.DECODE:
        return f"Decode is the bottleneck: {percent} of its places or of its KV cache are taken{most}{waiting}."
    return f"{_NAMES[stage].capitalize()} is the bottleneck: it computes {percent} of the time{most}{waiting}."


def _part(record: InstanceRecord, stage: Stage) -> Iterator[float]:
    """The part of an instance that a stage uses: of the time; where it decodes, which any sequence makes it do all
    of the time, of its places or its KV cache. Nothing where it is not known."""
    if stage is not Stage.DECODE:
        if (busy := _spent(record, lambda usage: usage.busy_s.get(stage.value, 0.0))) is not None:
            yield min(1.0, busy)
        return
    places = 0 if record.info is None else record.info.budgets.get("max_num_seqs", 0)
    yield max(kv_usage(record) or 0.0, min(1.0, record.load.num_running / places) if places else 0.0)


def _spent(record: InstanceRecord, seconds: Callable[[Usage], float]) -> float | None:
    """Seconds of something in each second between an instance's last two accounts; None: there are not two."""
    now = None if record.info is None else record.info.usage
    before = None if record.before is None else record.before.usage
    if now is None or before is None or now.at_s <= before.at_s:
        return None
    return max(0.0, seconds(now) - seconds(before)) / (now.at_s - before.at_s)


def _instance(record: InstanceRecord) -> dict[str, Any]:
    info, load = record.info, record.load
    usage = None if info is None else info.usage
    return {
        "name": record.name,
        "role": None if record.role is None else str(record.role),
        "state": record.state,
        "model": None if info is None else info.model,
        "device": None if info is None else info.device,
        "running": load.num_running,
        "waiting": load.num_waiting + load.num_waiting_encodes,
        "in_flight": sum(record.in_flight.values()),
        "pending_ms": {stage.value: round(1e3 * seconds, 2) for stage, seconds in pending_s(record).items()},
        "kv_usage": kv_usage(record),
        "restarts": record.num_restarts,
        "busy": _spent(record, lambda usage: sum(usage.busy_s.values())),
        "cpus": _spent(record, lambda usage: usage.cpu_s),
        "memory_bytes": None if usage is None else usage.memory_bytes,
        "device_bytes": None if usage is None else usage.device_bytes,
        "device_total_bytes": None if usage is None else usage.device_total_bytes,
    }


def _request(record: RequestRecord, now_s: float) -> dict[str, Any]:
    """Without what other clients should not see of it: whole ids and names of keys."""

    def ms(seconds: float | None) -> float | None:
        return None if seconds is None else round(1e3 * seconds, 2)

    return {
        "id": record.context.trace_id[:8],
        "endpoint": record.endpoint,
        "modality": record.modality,
        "images": record.num_media.get("image", 0),
        "videos": record.num_media.get("video", 0),
        "sounds": record.num_media.get("audio", 0),
        "status": record.status,
        "error": record.error,
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
