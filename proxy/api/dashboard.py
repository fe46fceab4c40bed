"""``/dashboard``, one self-contained page, and ``/dashboard/data``, its figures."""

from __future__ import annotations

import base64
import re
import time
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import RedirectResponse

from epd_serve.protocol.addresses import cross_site
from epd_serve.routing.table import InstanceRecord
from epd_serve.topology.notation import Topology, sends_features, sends_kv
from epd_serve.topology.placement import place_units
from epd_serve.types import PLURALS
from proxy.api.views import key_required
from proxy.gateway import Gateway
from proxy.observe.access_log import milliseconds, stages_of
from proxy.observe.figures import NUM_SLOTS
from proxy.observe.metrics import kv_usage, pending_s
from proxy.observe.record import RequestRecord

_PAGE = Path(__file__).with_name("dashboard.html")
_HEADERS = {"cache-control": "no-cache", "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}


@cache
def page() -> tuple[str, dict[str, str]]:
    """Return the page with a content security policy that allows only its own script and style, by hash."""
    text = _PAGE.read_text(encoding="utf-8")
    inline = dict(re.findall(r"<(script|style)>(.*?)</\1>", text, re.DOTALL))
    hashes = {kind: base64.b64encode(sha256(code.encode()).digest()).decode() for kind, code in inline.items()}
    policy = (
        f"default-src 'none'; script-src 'sha256-{hashes['script']}'; style-src 'sha256-{hashes['style']}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, {"content-security-policy": policy, **_HEADERS}


def dashboard_router(gateway: Gateway) -> APIRouter:
    """Return the dashboard's routes.

    The page is public and contains no data. The data need an API key; without keys, pages of other sites may not
    read them.
    """
    router = APIRouter(include_in_schema=False)
    authenticator = gateway.admission.authenticator
    check_key = key_required(authenticator)

    async def guard(request: Request) -> None:
        await check_key(request)
        problem = cross_site(request.scope["headers"], is_local=gateway.settings.is_local)
        if authenticator.anonymous and problem is not None:
            raise problem

    @router.api_route("/", methods=["GET", "HEAD"])
    async def home() -> RedirectResponse:
        return RedirectResponse("dashboard")

    @router.get("/dashboard")
    async def dashboard() -> Response:
        text, headers = page()
        return Response(text, media_type="text/html; charset=utf-8", headers=headers)

    @router.get("/dashboard/data", dependencies=[Depends(guard)])
    async def data() -> Response:
        shown = msgspec.json.encode(snapshot(gateway))
        return Response(shown, 200, {"cache-control": "no-store"}, "application/json")

    return router


def snapshot(gateway: Gateway) -> dict[str, Any]:
    """Return the data of the page. Times are in milliseconds."""
    fleet, queue, config, now_s = gateway.fleet, gateway.admission.queue, gateway.settings.config, time.monotonic()
    up_s, records, figures = now_s - gateway.observer.started_s, list(fleet.table), gateway.observer.figures
    return {
        "version": version("epd-serve"),
        "engine": config.engine,
        "uptime_s": round(up_s, 1),
        "topology": fleet.layout(),
        "models": list(fleet.table.models()),
        "missing": [stage.value for stage in fleet.table.missing_stages()],
        "running": queue.num_running,
        "waiting": queue.num_waiting,
        "slo": {"ttft_ms": config.slo.ttft_ms, "tpot_ms": config.slo.tpot_ms},
        "series": figures.series(now_s),
        "window": figures.window(now_s, min(NUM_SLOTS, max(1, round(up_s)))),
        "units": _units(records, fleet.topology),
        "instances": [_instance(record) for record in records],
        "links": [
            {"kind": kind, "source": source.name, "target": target.name}
            for source in records
            for target in records
            if source is not target and source.role is not None and target.role is not None
            for kind, sends in (("features", sends_features), ("kv", sends_kv))
            if sends(source.role, target.role)
        ],
        "requests": [_request(record) for record in figures.requests],
    }


def _instance(record: InstanceRecord) -> dict[str, Any]:
    info, load, before = record.info, record.load, record.before
    usage, cpus, busy = None if info is None else info.usage, None, None
    if usage is not None and before is not None and before.usage is not None and usage.at_s > before.usage.at_s:
        past, passed_s = before.usage, usage.at_s - before.usage.at_s
        cpus = max(0.0, usage.cpu_s - past.cpu_s) / passed_s
        busy = {of: max(0.0, one_s - past.busy_s.get(of, 0.0)) / passed_s for of, one_s in usage.busy_s.items()}
    return {
        "name": record.name,
        "role": None if record.role is None else str(record.role),
        "state": record.state,
        "device": None if info is None else info.device,
        "running": load.num_running,
        "waiting": load.num_waiting + load.num_waiting_encodes,
        "places": 0 if info is None else info.budgets.get("max_num_seqs", 0),
        "pending_ms": {stage.value: milliseconds(seconds) for stage, seconds in pending_s(record).items()},
        "kv_usage": kv_usage(record),
        "restarts": record.num_restarts,
        "busy": busy or None,
        "cpus": cpus,
        "memory_bytes": None if usage is None else usage.memory_bytes,
        "device_bytes": None if usage is None else usage.device_bytes,
        "device_total_bytes": None if usage is None else usage.device_total_bytes,
    }


def _request(record: RequestRecord) -> dict[str, Any]:
    """Describe a request without its full id and key name, which other clients should not see."""
    return {
        "id": record.context.trace_id[:8],
        "endpoint": record.endpoint,
        **{PLURALS[modality]: count for modality, count in record.num_media.items()},
        "status": record.status,
        "error": record.error,
        "ms": milliseconds(record.duration_s),
        "prompt_tokens": record.prompt_tokens,
        "tokens": record.output_tokens,
        "retries": record.retries + record.continuations,
        "stages": [{**stage, "item": ""} for stage in stages_of(record)],
    }


def _units(records: list[InstanceRecord], topology: Topology | None) -> list[dict[str, Any]]:
    """Group instances by shared devices if they match the topology, else one per group."""
    names = [record.name for record in records]
    if topology is not None:
        devices = [f"device {index}" for index in range(topology.num_devices)]
        replicas = [replica for group in place_units(topology, devices) for replica in group]
        if sorted(instance.name for replica in replicas for instance in replica) == sorted(names):
            return [
                {
                    "title": ", ".join(dict.fromkeys(device for one in replica for device in one.devices)),
                    "instances": [one.name for one in replica],
                }
                for replica in replicas
            ]
    return [{"title": "", "instances": [name]} for name in names]
