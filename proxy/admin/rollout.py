"""The part of the admin API with which the launcher changes a deployment (epd_serve/launch/rollout.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from epd_serve.config import DeploymentConfig
from epd_serve.errors import InvalidRequest
from epd_serve.protocol.instance_state import LeaveOrder
from epd_serve.routing.table import InstanceTable
from proxy.admin.switches import Hold, Switches, decoded


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


#: A step of an apply may take an hour (epd_serve/cli/apply.py).
_LONGEST_HOLD_S = 7200.0


class HoldBody(msgspec.Struct, frozen=True):
    """Body of ``POST /hold``."""

    seconds: Annotated[float, msgspec.Meta(ge=0, le=_LONGEST_HOLD_S)]


@dataclass(frozen=True)
class GatewayFiles:
    """The gateway's file, and other configurations that it may get.

    Attributes:
        file: of the gateway.
        reload: takes the gateway's file over. Raises ValueError or OSError.
        left_by: lists the settings of another configuration that a running gateway does not take over. Raises
            ValueError.
    """

    file: Path
    reload: Callable[[], None]
    left_by: Callable[[DeploymentConfig], list[str]]


def rollout_router(table: InstanceTable, switches: Switches, hold: Hold) -> APIRouter:
    """``GET /ready``, ``POST /instances/{name}/leave`` and ``/hold``."""
    router = APIRouter()

    @router.get("/ready")
    async def ready() -> JSONResponse:
        """The instances to which the gateway gives work."""
        return JSONResponse({"ready": sorted(one.name for one in table if one.state == "up")})

    @router.post("/instances/{name}/leave")
    async def leave(name: str, request: Request) -> JSONResponse:
        """Answers when nothing is left of what it had; if the caller does not wait for that, it serves on."""
        order = decoded(await request.body(), LeaveOrder)
        seconds = await _while_asked(request, switches.leave(name, order))
        return JSONResponse({"instance": name, "seconds": seconds})

    @router.post("/hold")
    async def hold_now(request: Request) -> JSONResponse:
        """For so many ``seconds`` the orders that no operator gave are refused."""
        seconds = decoded(await request.body(), HoldBody).seconds
        hold.until_s = asyncio.get_running_loop().time() + seconds
        return JSONResponse({})

    return router


def files_router(files: GatewayFiles) -> APIRouter:
    """``POST /reload`` and ``/check``, for the socket alone: a configuration names files that are read."""
    router = APIRouter()

    @router.post("/reload")
    async def reload_now() -> JSONResponse:
        """Take the gateway's file over now."""
        _read(files.reload)
        return JSONResponse({})

    @router.post("/check")
    async def check(request: Request) -> JSONResponse:
        """``left``: the options of another configuration, the body, that would need another start."""
        text = await request.body()
        left = _read(lambda: files.left_by(DeploymentConfig.model_validate_json(text)))
        return JSONResponse({"left": left})

    return router


def _read(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (ValueError, OSError) as error:
        raise InvalidRequest(str(error)) from error
