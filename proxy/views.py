"""The small pages: models, health, metrics."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse

from epd_serve.errors import ModelNotFound, Unavailable
from epd_serve.metrics.gateway import CONTENT_TYPE, GatewayMetrics
from epd_serve.protocol.wire import InstanceInfo
from epd_serve.routing.table import InstanceTable
from proxy.auth import Authenticator
from proxy.poller import Poller


def models_router(table: InstanceTable, poller: Poller, authenticator: Authenticator) -> APIRouter:
    """``GET /v1/models`` and ``/v1/models/{name}``."""

    async def authorized(request: Request) -> None:
        authenticator.check(request.headers.get("authorization"))

    router = APIRouter(dependencies=[Depends(authorized)])
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
    async def models() -> JSONResponse:
        await poller.started()
        found = table.models()
        if not found:
            raise Unavailable("no instance has started yet; try again shortly")
        return JSONResponse({"object": "list", "data": [describe(info) for info in found.values()]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> JSONResponse:
        await poller.started()
        found = table.models()
        if name not in found:
            known = ", ".join(map(repr, found)) or "none yet"
            raise ModelNotFound(f"there is no model {name[:100]!r}; served here: {known}", param="model")
        return JSONResponse(describe(found[name]))

    return router


def health_router(table: InstanceTable, metrics: GatewayMetrics) -> APIRouter:
    """``GET /health``, ``/health/ready`` (the same), ``/health/live`` and ``/metrics``."""
    router = APIRouter()

    @router.get("/health")
    @router.get("/health/ready")
    async def ready() -> JSONResponse:
        missing = table.missing_stages()
        instances = {
            record.name: {"role": str(record.role) if record.role else None, "ready": record.ready}
            for record in table
        }
        status = "waiting for " + " and ".join(missing) if missing else "ready"
        return JSONResponse({"status": status, "instances": instances}, 503 if missing else 200)

    @router.get("/health/live")
    async def live() -> JSONResponse:
        return JSONResponse({"status": "live"})

    @router.get("/metrics")
    async def exposition() -> Response:
        instances = (
            (record.name, record.ready, [(stage.value, count) for stage, count in record.in_flight.items()])
            for record in table
        )
        return Response(metrics.render(instances), media_type=CONTENT_TYPE)

    return router
