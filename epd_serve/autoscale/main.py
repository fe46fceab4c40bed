"""``epd-serve autoscale``: fits a running deployment to its load, as a client of its admin API."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from epd_serve.autoscale.controller import Order
from epd_serve.autoscale.replanning import Replanner
from epd_serve.autoscale.role_loop import RoleLoop
from epd_serve.autoscale.seen import Seen, from_json
from epd_serve.config import DeploymentConfig
from epd_serve.rpc.admin import AdminClient, AdminError

logger = logging.getLogger(__name__)

_TIMEOUT_S = 10.0
#: Beyond an order's deadline, for an instance that makes its new stages, or its old ones again.
_REBUILD_S = 130.0
#: Between two looks at the requests that were served.
_LOOK_S = 0.5


async def autoscale(config: DeploymentConfig, admin: AdminClient, deployment: str | None) -> None:
    """Run what ``config`` enables until cancelled.

    ``deployment``: the name by which ``epd-serve apply`` finds it; None: plans are not applied.
    """
    async with asyncio.TaskGroup() as group:
        if config.elastic.enabled:
            site = _Site(admin)
            group.create_task(RoleLoop(config, site.look, site.give, site.report).run())
        if config.elastic.drift.enabled:
            replanner = Replanner(config)
            replanner.deployment = deployment
            group.create_task(replanner.run())
            group.create_task(_follow_requests(admin, replanner))


class _Site:
    """The deployment as the controller sees and changes it."""

    def __init__(self, admin: AdminClient) -> None:
        self._admin = admin

    async def look(self) -> Sequence[Seen]:
        return from_json((await self._admin.ask("GET", "/load", timeout_s=_TIMEOUT_S))["instances"])

    async def give(self, order: Order, deadline_s: float) -> None:
        body = {"role": str(order.role), "deadline_s": deadline_s, "automatic": True}
        await self._admin.ask("POST", f"/instances/{order.instance}/role", body, deadline_s + _REBUILD_S)

    async def report(self, decision: dict[str, Any]) -> None:
        with suppress(AdminError, TimeoutError):
            await self._admin.ask("POST", "/elastic", decision, _TIMEOUT_S)


async def _follow_requests(admin: AdminClient, replanner: Replanner) -> None:
    """Give the replanner each request that the gateway has served, until cancelled."""
    last, problem = 0, ""
    while True:
        before, problem = problem, ""
        try:
            answer = await admin.ask("GET", f"/requests/served?after={last}", timeout_s=_TIMEOUT_S)
            load = await admin.ask("GET", "/load", timeout_s=_TIMEOUT_S) if answer["requests"] else None
        except (AdminError, TimeoutError) as error:
            problem = str(error) or "the gateway does not answer"
            if problem != before:
                logger.warning("elastic: requests are not seen: %s", problem)
        else:
            last = answer["last"]
            if load is not None:
                replanner.tokens_per_pixel = load["tokens_per_pixel"]
            for request in answer["requests"]:
                replanner.put(msgspec.json.encode(request))
        await asyncio.sleep(_LOOK_S)
