"""What an operator does to instances while the gateway runs; for the admin plane."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from epd_serve.routing.table import InstanceTable
from proxy.health import Health
from proxy.switches import Switches


def operations_router(table: InstanceTable, health: Health, switches: Switches) -> APIRouter:
    """``GET /admin/instances``, ``POST /admin/instances/{name}/drain`` and ``/undrain``."""
    router = APIRouter()

    def describe(name: str) -> dict[str, object]:
        record = switches.find(name)
        return {
            "name": name,
            "url": record.url,
            "role": str(record.role) if record.role else None,
            "ready": record.ready,
            **health.describe(name),
            "in_flight": sum(record.in_flight.values()),
        }

    @router.get("/admin/instances")
    async def instances() -> JSONResponse:
        """Every instance with what this gateway thinks of it."""
        return JSONResponse({"instances": [describe(record.name) for record in table]})

    @router.post("/admin/instances/{name}/drain")
    async def drain(name: str) -> JSONResponse:
        """No new requests for it; it is empty when ``in_flight`` is 0."""
        describe(name)
        health.drain(name)
        return JSONResponse(describe(name))

    @router.post("/admin/instances/{name}/undrain")
    async def undrain(name: str) -> JSONResponse:
        """It takes requests again."""
        describe(name)
        health.drain(name, False)
        return JSONResponse(describe(name))

    return router
