"""The operator's work on instances while the gateway runs; for the admin plane."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from epd_serve.routing.table import InstanceTable
from proxy.admin.shared_state import InFlight, in_flight_everywhere
from proxy.admin.switches import Switches
from proxy.fleet.health import Health
from proxy.workers.crew import Crew, Drained


def operations_router(table: InstanceTable, health: Health, switches: Switches, crew: Crew) -> APIRouter:
    """``GET /admin/instances``, ``POST /admin/instances/{name}/drain`` and ``/undrain``, which answer with the
    workers that have not said in time that they know it, too."""
    router = APIRouter()

    async def order(name: str, *, drain: bool) -> JSONResponse:
        switches.find(name)
        health.drain(name, drain)
        unconfirmed = await crew.share(Drained(name, switches.find(name).url, drain))
        now = describe(name, await in_flight_everywhere(crew, table))
        return JSONResponse({**now, "unconfirmed": unconfirmed})

    def describe(name: str, in_flight: InFlight) -> dict[str, object]:
        record = switches.find(name)
        return {
            "name": name,
            "url": record.url,
            "role": str(record.role) if record.role else None,
            "ready": record.ready,
            **health.describe(name),
            "in_flight": sum(in_flight.get(name, {}).values()),
        }

    @router.get("/admin/instances")
    async def instances() -> JSONResponse:
        """Every instance with what this gateway thinks of it."""
        in_flight = await in_flight_everywhere(crew, table)
        return JSONResponse({"instances": [describe(record.name, in_flight) for record in table]})

    @router.post("/admin/instances/{name}/drain")
    async def drain(name: str) -> JSONResponse:
        """No new requests for it; it is empty when ``in_flight`` is 0."""
        return await order(name, drain=True)

    @router.post("/admin/instances/{name}/undrain")
    async def undrain(name: str) -> JSONResponse:
        """It takes requests again."""
        return await order(name, drain=False)

    return router
