"""The part of the admin API with which the launcher changes a deployment (epd_serve/launch/apply.py)."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from epd_serve.errors import InvalidRequest
from epd_serve.protocol.instance_state import LeaveOrder
from epd_serve.topology import parse_topology
from proxy.admin.switches import Switches, decoded
from proxy.fleet.members import Member, Members


class InstancesBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of ``PUT /instances``: all instances of the deployment by name."""

    topology: str
    instances: dict[str, Member]


def leave_router(switches: Switches) -> APIRouter:
    """``POST /instances/{name}/leave``."""
    router = APIRouter()

    @router.post("/instances/{name}/leave")
    async def leave(name: str, request: Request) -> JSONResponse:
        """Answer when nothing is left of what it had."""
        seconds = await switches.leave(name, decoded(await request.body(), LeaveOrder))
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
