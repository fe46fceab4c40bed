"""The small pages: models, health, metrics."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, RedirectResponse

from epd_serve.errors import InvalidRequest, ModelNotFound, Unavailable
from epd_serve.protocol.instance_state import InstanceInfo
from epd_serve.routing.table import InstanceTable
from epd_serve.types import Role, Stage
from proxy.admission.keys import Authenticator
from proxy.fleet.monitor import Monitor
from proxy.observe.metrics import CONTENT_TYPE, GatewayMetrics

_READ = ["GET", "HEAD"]


def key_required(authenticator: Authenticator) -> Callable[[Request], Awaitable[None]]:
    """A dependency for routes that ask for an API key."""

    async def check(request: Request) -> None:
        authenticator.check(request.headers.get("authorization"))

    return check


def models_router(table: InstanceTable, monitor: Monitor, authenticator: Authenticator) -> APIRouter:
    """``GET /v1/models`` and ``/v1/models/{name}``."""

    router = APIRouter(dependencies=[Depends(key_required(authenticator))])
    created = int(time.time())

    def describe(info: InstanceInfo) -> dict[str, Any]:
        return {
            "id": info.model,
            "object": "model",
            "created": created,
            "owned_by": "epd-serve",
            "root": info.model_path,
            "parent": None,
            "max_model_len": info.max_model_len,
        }

    @router.get("/v1/models")
    @router.get("/v1/models/")
    async def models() -> JSONResponse:
        await monitor.started.wait()
        found = table.models()
        if not found:
            raise Unavailable("no instance has started yet; try again shortly")
        return JSONResponse({"object": "list", "data": [describe(info) for info in found.values()]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> JSONResponse:
        await monitor.started.wait()
        found = table.models()
        if name not in found:
            known = ", ".join(map(repr, found)) or "none yet"
            raise ModelNotFound(f"there is no model {name[:100]!r}; served here: {known}", param="model")
        return JSONResponse(describe(found[name]))

    return router


def home_router(table: InstanceTable, authenticator: Authenticator, *, dashboard: bool) -> APIRouter:
    """``GET /``: the dashboard, or where there is none a text on how to ask."""
    router = APIRouter(include_in_schema=False)

    @router.api_route("/", methods=_READ)
    async def home(request: Request) -> Response:
        if dashboard:
            return RedirectResponse("dashboard")
        name = next(iter(table.models()), "MODEL") if authenticator.anonymous else "MODEL"
        key = "" if authenticator.anonymous else " -H 'Authorization: Bearer YOUR-KEY'"
        body = {"model": name, "messages": [{"role": "user", "content": "Say hello"}]}
        return PlainTextResponse(
            "This is the gateway of an epd-serve deployment. It speaks the OpenAI API below /v1. Ask it:\n\n"
            f"curl {request.base_url}v1/chat/completions{key} -H 'Content-Type: application/json' "
            f"-d '{json.dumps(body)}'\n",
            headers={"x-content-type-options": "nosniff"},
        )

    return router


def health_router(table: InstanceTable, metrics: GatewayMetrics, monitor: Monitor) -> APIRouter:
    """``GET /health``, ``/health/ready``, ``/health/live`` and ``/metrics``, open to all.

    ``/health?role=EPD`` asks for a ready encoder, too. ``/health/ready`` is for load balancers: its status is 200
    also while requests wait for P and D to come back, as another gateway has lost the same.
    """
    router = APIRouter()

    @router.api_route("/health", methods=_READ)
    async def whole(role: str = "PD") -> JSONResponse:
        return answer(role, takes_requests=False)

    @router.api_route("/health/ready", methods=_READ)
    async def ready(role: str = "PD") -> JSONResponse:
        return answer(role, takes_requests=role == "PD" and monitor.is_awaited)

    def answer(role: str, *, takes_requests: bool) -> JSONResponse:
        """``takes_requests``: whether it does although stages are missing."""
        try:
            wanted = Role.parse(role).stages
        except ValueError as error:
            raise InvalidRequest(str(error), param="role") from None
        missing = table.missing_stages([stage for stage in Stage if stage in wanted])
        instances = {
            record.name: {
                "role": str(record.role) if record.role else None,
                "ready": record.state == "up",  # as for the status: those that get work
            }
            for record in table
        }
        status = "waiting for " + " and ".join(missing) if missing else "ready"
        return JSONResponse(
            {"status": status, "instances": instances}, 503 if missing and not takes_requests else 200
        )

    @router.api_route("/health/live", methods=_READ)
    async def live() -> JSONResponse:
        return JSONResponse({"status": "live"})

    @router.get("/metrics")
    async def exposition() -> Response:
        return Response(metrics.render(table), media_type=CONTENT_TYPE)

    return router
