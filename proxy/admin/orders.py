"""The launcher's orders, on a socket that its owner alone can reach: the admin plane and departures.

``epd-serve apply`` changes a deployment through these; ``epd_serve/launch/orders.py`` is the other side.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse

from epd_serve.backends.base import StageCalls
from epd_serve.backends.native import NativeInstance
from epd_serve.errors import InvalidRequest, StageTimeout
from epd_serve.protocol.wire import LeaveOrder
from epd_serve.routing.table import InstanceTable
from proxy.admin.plane import serving
from proxy.admin.switches import Hold, Switches
from proxy.workers.crew import Crew

#: Beyond its deadline, for the answer of an instance that has just become empty.
_MARGIN_S = 10.0


class Departures:
    """Has instances finish what they have, so that they can be ended."""

    def __init__(self, switches: Switches, calls: Mapping[str, StageCalls]) -> None:
        self._switches = switches
        self._calls = calls

    async def leave(self, name: str, order: LeaveOrder) -> float:
        """Return when nothing is left of what it had, with the seconds that it took. It gets nothing new.

        Cancelled before, it serves on.

        Raises:
            InvalidRequest: there is no such instance, or none that can be asked to leave.
            Conflict: it is leaving or on its way to another role, or a stage would be left without an instance.
            StageTimeout: it was not empty by the deadline; it serves on.
        """
        self._switches.find(name)
        calls = self._calls[name]
        if not isinstance(calls, NativeInstance):
            raise InvalidRequest(f"instance {name} runs on an engine that cannot be told to leave")
        async with self._switches.leaving(name):
            try:
                async with asyncio.timeout(order.deadline_s + _MARGIN_S):
                    return (await calls.leave(order)).seconds
            except TimeoutError as error:
                raise StageTimeout(f"instance {name} did not say whether it is empty") from error


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


@dataclass(frozen=True)
class OrdersSettings:
    """The place and the manner in which orders are taken.

    Attributes:
        path: of the socket.
        reload: takes the gateway's file over. Raises ValueError or OSError.
        left_by: the settings of another file that a running gateway does not take over. Likewise.
    """

    path: Path
    reload: Callable[[], None]
    left_by: Callable[[Path], list[str]]


def show_ready(crew: Crew, table: InstanceTable) -> None:
    """Show, for each worker, the instances that it gives work; for :func:`orders_router`."""
    crew.shown["ready"] = lambda: _ready(table)


def _ready(table: InstanceTable) -> list[str]:
    return [record.name for record in table if record.ready and record.accepting]


def orders_router(
    table: InstanceTable, departures: Departures, hold: Hold, settings: OrdersSettings, crew: Crew
) -> APIRouter:
    """``POST /instances/{name}/leave``, ``/reload``, ``/check`` and ``/hold``; ``GET /ready``."""
    router = APIRouter()

    @router.get("/ready")
    async def ready() -> JSONResponse:
        """The instances to which each worker of the gateway gives work; none while one of them does not answer."""
        others = await crew.ask_all("ready", list[str])
        found = [] if others is None else sorted(set(_ready(table)).intersection(*others))
        return JSONResponse({"ready": found})

    @router.post("/instances/{name}/leave")
    async def leave(name: str, request: Request) -> JSONResponse:
        """Answers when nothing is left of what it had; if the caller does not wait for that, it serves on."""
        order = LeaveOrder(**await request.json())
        seconds = await _while_asked(request, departures.leave(name, order))
        return JSONResponse({"instance": name, "seconds": seconds})

    @router.post("/reload")
    async def reload_now() -> JSONResponse:
        """Take the gateway's file over now."""
        _read(settings.reload)
        return JSONResponse({})

    @router.post("/check")
    async def check(request: Request) -> JSONResponse:
        """``left``: what of another file would need another start."""
        file = Path((await request.json())["file"])
        return JSONResponse({"left": _read(lambda: settings.left_by(file))})

    @router.post("/hold")
    async def hold_now(request: Request) -> JSONResponse:
        """For so many ``seconds`` the controller gives no orders."""
        hold.until_s = asyncio.get_running_loop().time() + float((await request.json())["seconds"])
        return JSONResponse({})

    return router


def _read(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (ValueError, OSError) as error:
        raise InvalidRequest(str(error)) from error


@asynccontextmanager
async def running_orders(app: FastAPI, path: Path) -> AsyncIterator[None]:
    """Serve ``app`` on a Unix socket while the context lasts; what lay at ``path`` before is taken away.

    Whoever can enter the socket's directory can give orders. Raises ValueError where it cannot listen there.
    """
    async with serving(app, await asyncio.to_thread(_listen, path)):
        yield


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        listener.listen()
    except OSError as error:
        listener.close()
        raise ValueError(f"the gateway cannot take orders at {path}: {error.strerror or error}") from error
    return listener
