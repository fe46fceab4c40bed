"""The controller at work: what the table knows goes in, orders and wishes come out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from epd_serve.config import DeploymentConfig
from epd_serve.config.elastic import HookConfig
from epd_serve.elastic.controller import Controller, Decision, Kind, Order, Wish
from epd_serve.elastic.hook import tell
from epd_serve.elastic.options import Limits
from epd_serve.elastic.seen import see
from epd_serve.errors import InvalidRequest, ServeError
from epd_serve.routing.table import InstanceTable
from epd_serve.types import Stage

logger = logging.getLogger(__name__)

#: Beyond its deadline, for an instance that makes its new stages.
_REBUILD_S = 60.0
_NUM_KEPT = 500

#: Carries out an order; raises ServeError where it cannot.
GiveOrder = Callable[[Order, float], Awaitable[Any]]


class ElasticLoop:
    """Decides each ``interval_s``; an order is carried out beside it, one at a time.

    Attributes:
        decisions: each that orders or wishes something, and the first of each row of equal ones, with its time.
    """

    def __init__(
        self, config: DeploymentConfig, table: InstanceTable, give: GiveOrder, *, calm_s: float = 60.0
    ) -> None:
        slo = config.slo
        assert slo.ttft_ms is not None and slo.tpot_ms is not None
        self._options = config.elastic
        self._table = table
        self._give = give
        self._controller = Controller(
            config.elastic,
            Limits(ttft_s=slo.ttft_ms / 1e3, tpot_s=slo.tpot_ms / 1e3),
            needed=tuple(stage for stage in Stage if stage in config.topology.stages),
            rebuild_s=_REBUILD_S,
            calm_s=calm_s,
        )
        self.decisions: deque[dict[str, Any]] = deque(maxlen=_NUM_KEPT)
        self._last: Kind | None = None

    async def run(self) -> None:
        """Until cancelled; orders under way are given up then, which leaves them to their deadline."""
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(self._options.interval_s)
                now_s = time.monotonic()
                try:
                    decision = self._controller.decide(now_s, see(self._table))
                except Exception as error:  # a moment that it cannot judge must not be its last
                    if self._last is not Kind.UNDECIDED:
                        logger.exception("elastic: nothing is decided at this moment")
                    reason = f"{type(error).__name__}: {error}"
                    decision = Decision(at_s=now_s, kind=Kind.UNDECIDED, reason=reason)
                self._note(decision)
                if decision.order is not None:
                    group.create_task(self._carry_out(decision.order))
                if decision.wish is not None and self._options.hook is not None:
                    group.create_task(self._tell(self._options.hook, decision.wish))

    def _note(self, decision: Decision) -> None:
        """Each decision is logged with its reason; a row of equal ones once."""
        wish, order = decision.wish, decision.order or decision.would
        if decision.kind is self._last and order is None and wish is None:
            return
        self._last = decision.kind
        quiet = decision.kind is Kind.CALM and wish is None
        logger.log(logging.DEBUG if quiet else logging.INFO, "elastic: %s", decision.reason)
        if wish is not None:
            logger.info("elastic: %s of role %s: %s", _event(wish), wish.role, wish.reason)
        self.decisions.append(
            {
                "time": time.time(),
                "kind": decision.kind.value,
                "reason": decision.reason,
                "order": None if order is None else {"instance": order.instance, "role": str(order.role)},
                "wish": None if wish is None else {"event": _event(wish), "role": str(wish.role)},
                "pressures": {stage.value: round(value, 3) for stage, value in decision.pressures.items()},
            }
        )

    async def _carry_out(self, order: Order) -> None:
        try:
            await self._give(order, self._options.deadline_s)
        except InvalidRequest as error:
            self._controller.refused(order)
            logger.warning("elastic: %s will not become %s: %s", order.instance, order.role, error.message)
        except ServeError as error:
            self._controller.failed(order)
            logger.warning("elastic: %s did not become %s: %s", order.instance, order.role, error.message)
        except Exception:  # one order must not end the controller
            self._controller.failed(order)
            logger.exception("elastic: the order for %s failed", order.instance)
        else:
            logger.info("elastic: %s serves %s", order.instance, order.role)

    async def _tell(self, hook: HookConfig, wish: Wish) -> None:
        await tell(hook, {"event": _event(wish), "role": str(wish.role), "reason": wish.reason})


def elastic_router(loop: ElasticLoop | None) -> APIRouter:
    """``GET /elastic`` of the admin plane."""
    router = APIRouter()

    @router.get("/elastic")
    async def elastic() -> JSONResponse:
        """Return the controller's decisions, newest last; null where this gateway has none."""
        return JSONResponse({"decisions": None if loop is None else list(loop.decisions)})

    return router


def _event(wish: Wish) -> str:
    return "more" if wish.change > 0 else "fewer"
