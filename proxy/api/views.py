"""The small pages: models, health, metrics."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Depends, Request, Response, Security
from fastapi.responses import JSONResponse, PlainTextResponse, RedirectResponse

from epd_serve.errors import InvalidRequest, ModelNotFound, Unavailable
from epd_serve.protocol.instance_state import InstanceInfo
from epd_serve.protocol.openai import answers
from epd_serve.routing.table import InstanceTable
from epd_serve.types import Role, Stage
from proxy.admission.keys import Authenticator
from proxy.api.routes import bearer, error_answers
from proxy.fleet.monitor import Monitor
from proxy.observe.metrics import CONTENT_TYPE, GatewayMetrics


def key_required(authenticator: Authenticator) -> Callable[[Request], Awaitable[None]]:
    """A dependency for routes that ask for an API key."""

    async def check(request: Request) -> None:
        authenticator.check(request.headers.get("authorization"))

    return check


def models_router(table: InstanceTable, monitor: Monitor, authenticator: Authenticator) -> APIRouter:
    """``GET /v1/models`` and ``/v1/models/{name}``."""

    router = APIRouter(dependencies=[Security(bearer), Depends(key_required(authenticator))])
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

    @router.get("/v1/models", responses={200: {"model": answers.ModelList}, **error_answers(401, 503)})
    @router.get("/v1/models/", include_in_schema=False)
    async def models() -> JSONResponse:
        await monitor.started.wait()
        found = table.models()
        if not found:
            raise Unavailable("no instance has started yet; try again shortly")
        return JSONResponse({"object": "list", "data": [describe(info) for info in found.values()]})

    @router.get(
        "/v1/models/{name:path}", responses={200: {"model": answers.ModelCard}, **error_answers(401, 404, 503)}
    )
    async def model(name: str) -> JSONResponse:
        await monitor.started.wait()
        found = table.models()
        if name not in found:
            known = ", ".join(map(repr, found)) or "none yet"
            raise ModelNotFound(f"there is no model {name[:100]!r}; served here: {known}", param="model")
        return JSONResponse(describe(found[name]))

    return router


def home_router() -> APIRouter:
    """``GET /``: the dashboard."""
    router = APIRouter(include_in_schema=False)

    @router.api_route("/", methods=["GET", "HEAD"])
    async def home() -> Response:
        return RedirectResponse("dashboard")

    return router


def health_router(table: InstanceTable, metrics: GatewayMetrics, monitor: Monitor) -> APIRouter:
    """``GET /health``, ``/health/ready``, ``/health/live`` and ``/metrics``, open to all.

    ``/health?role=EPD`` asks for a ready encoder, too. ``/health/ready`` is for load balancers: its status is 200
    also while requests wait for P and D to come back, as another gateway has lost the same.
    """
    router = APIRouter()

    states: dict[int | str, dict[str, Any]] = {
        200: {"model": answers.ReadyAnswer},
        **error_answers(400),
        503: {"model": answers.ReadyAnswer, "description": "Stages are missing."},
    }

    @router.head("/health", include_in_schema=False)
    @router.get("/health", responses=states)
    async def whole(role: str = "PD") -> JSONResponse:
        return answer(role, takes_requests=False)

    @router.head("/health/ready", include_in_schema=False)
    @router.get("/health/ready", responses=states)
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

    @router.head("/health/live", include_in_schema=False)
    @router.get("/health/live", responses={200: {"model": answers.LiveAnswer}})
    async def live() -> JSONResponse:
        return JSONResponse({"status": "live"})

    @router.get("/metrics", response_class=PlainTextResponse)
    async def exposition() -> Response:
        return Response(metrics.render(table), media_type=CONTENT_TYPE)

    return router
