"""The part of the admin API with which the launcher changes a deployment (epd_serve/launch/apply.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from epd_serve.errors import InvalidRequest
from epd_serve.protocol.instance_state import LeaveOrder
from epd_serve.routing.table import InstanceTable
from epd_serve.topology import parse_topology
from proxy.admin.switches import Switches, decoded
from proxy.fleet.members import Member, Members


class InstancesBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of ``PUT /instances``: all instances of the deployment by name."""

    topology: str
    instances: dict[str, Member]


def apply_router(table: InstanceTable, switches: Switches) -> APIRouter:
    """``GET /ready`` and ``POST /instances/{name}/leave``."""
    router = APIRouter()

    @router.get("/ready")
    async def ready() -> JSONResponse:
        """Name the instances to which the gateway gives work."""
        return JSONResponse({"ready": sorted(one.name for one in table if one.state == "up")})

    @router.post("/instances/{name}/leave")
    async def leave(name: str, request: Request) -> JSONResponse:
        """Answer when nothing is left of what it had; if the caller does not wait for that, it serves on."""
        order = decoded(await request.body(), LeaveOrder)
        seconds = await _while_asked(request, switches.leave(name, order))
        return JSONResponse({"instance": name, "seconds": seconds})

    return router


def instances_router(members: Members) -> APIRouter:
    """``PUT /instances``, for the socket alone: who names instances gets the prompts."""
    router = APIRouter()

    @router.put("/instances")
    async def replace(request: Request) -> JSONResponse:
        """Replace the instances of the deployment; those that joined by themselves stay."""
        body = decoded(await request.body(), InstancesBody)
        try:
            members.replace(body.instances, parse_topology(body.topology))
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        return JSONResponse({})

    return router


async def _while_asked(request: Request, work: Coroutine[Any, Any, float]) -> float | None:
    """Return the work's result; None where the caller left before, and the work is cancelled then."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
