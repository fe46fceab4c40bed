"""Routes without a body: models, health and metrics."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Literal

from fastapi import APIRouter, Depends, Request, Response, Security
from fastapi.responses import PlainTextResponse
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field

from epd_serve.errors import InvalidRequest, ModelNotFound, Unavailable
from epd_serve.protocol.instance_state import InstanceInfo
from epd_serve.types import Role, Stage
from proxy.admission import Authenticator
from proxy.api.routes import bearer, error_answers
from proxy.gateway import Gateway


def key_required(authenticator: Authenticator) -> Callable[[Request], Awaitable[None]]:
    """Return a FastAPI dependency that checks the API key."""

    async def check(request: Request) -> None:
        authenticator.check(request.headers.get("authorization"), request.headers.get("x-api-key"))

    return check


class ModelCard(BaseModel):
    """A model."""

    id: str = Field(description="Name of the model.")
    object: Literal["model"] = Field(default="model", description="Kind of the object.")
    created: int = Field(description="Start time of the gateway in seconds since the epoch.")
    owned_by: str = Field(default="epd-serve", description="The server.")
    root: str = Field(description="Path or hub name of the checkpoint.")
    parent: None = Field(default=None, description="Always null.")
    max_model_len: int = Field(description="Most tokens of a prompt and its answer.")


class ModelList(BaseModel):
    """The models served."""

    object: Literal["list"] = Field(default="list", description="Kind of the object.")
    data: list[ModelCard] = Field(description="The models.")


def models_router(gateway: Gateway) -> APIRouter:
    """Return ``GET /v1/models`` and ``/v1/models/{name}``."""
    check_key = key_required(gateway.admission.authenticator)
    router = APIRouter(dependencies=[Security(bearer), Depends(check_key)])
    fleet, created = gateway.fleet, int(time.time())

    def card(info: InstanceInfo) -> ModelCard:
        return ModelCard(id=info.model, created=created, root=info.model_path, max_model_len=info.max_model_len)

    @router.get("/v1/models", responses=error_answers(401, 503))
    @router.get("/v1/models/", include_in_schema=False)
    async def models() -> ModelList:
        await fleet.started.wait()
        found = fleet.table.models()
        if not found:
            raise Unavailable("no instance has started yet; try again shortly")
        return ModelList(data=[card(info) for info in found.values()])

    @router.get("/v1/models/{name:path}", responses=error_answers(401, 404, 503))
    async def model(name: str) -> ModelCard:
        await fleet.started.wait()
        found = fleet.table.models()
        if name not in found:
            known = ", ".join(map(repr, found)) or "none yet"
            raise ModelNotFound(f"no model {name[:100]!r}; served here: {known}", param="model")
        return card(found[name])

    return router


class InstanceState(BaseModel):
    """State of an instance."""

    role: str | None = Field(description="Stages of the instance.")
    ready: bool = Field(description="Whether it accepts requests.")


class Readiness(BaseModel):
    """State of the deployment."""

    status: str = Field(description='"ready", or the stages without an instance.')
    instances: dict[str, InstanceState] = Field(default_factory=dict, description="States by name.")


class Liveness(BaseModel):
    """State of the gateway process."""

    status: Literal["live"] = Field(default="live", description="Always live.")


def health_router(gateway: Gateway) -> APIRouter:
    """Return the public routes ``GET /health``, ``/health/ready``, ``/health/live`` and ``/metrics``.

    ``/health?role=EPD`` also requires a ready encoder. ``/health/ready`` is for load balancers: it stays 200 while
    requests wait for P and D to return, because other gateways have lost the same instances.
    """
    router, fleet, queue = APIRouter(), gateway.fleet, gateway.admission.queue
    states = {**error_answers(400), 503: {"model": Readiness, "description": "Stages are missing."}}

    @router.head("/health", include_in_schema=False)
    @router.get("/health", responses=states)
    async def whole(response: Response, role: str = "PD") -> Readiness:
        return answer(response, role, takes_requests=False)

    @router.head("/health/ready", include_in_schema=False)
    @router.get("/health/ready", responses=states)
    async def ready(response: Response, role: str = "PD") -> Readiness:
        return answer(response, role, takes_requests=role == "PD" and fleet.is_awaited)

    def answer(response: Response, role: str, *, takes_requests: bool) -> Readiness:
        try:
            wanted = Role.parse(role).stages
        except ValueError as error:
            raise InvalidRequest(str(error), param="role") from None
        missing = fleet.table.missing_stages([stage for stage in Stage if stage in wanted])
        if missing and not takes_requests:
            response.status_code = 503
        instances = {  # ready, as in the status: receives requests
            one.name: InstanceState(role=str(one.role) if one.role else None, ready=one.state == "up")
            for one in fleet.table
        }
        return Readiness(
            status="waiting for " + " and ".join(missing) if missing else "ready", instances=instances
        )

    @router.head("/health/live", include_in_schema=False)
    @router.get("/health/live")
    async def live() -> Liveness:
        return Liveness()

    @router.get("/metrics", response_class=PlainTextResponse)
    async def exposition() -> Response:
        text = gateway.observer.metrics.render(fleet.table, queue.num_running, queue.num_waiting)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return router
