"""``epd-serve autoscale``: poll the admin API, decide and order role switches."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import Any

import msgspec

from epd_serve.autoscale.controller import DEADLINE_S, Controller, Decision, Kind, Order
from epd_serve.autoscale.drift import DriftDetector, ServedRequest
from epd_serve.autoscale.instance_load import from_json
from epd_serve.autoscale.pressure import Limits
from epd_serve.config import DeploymentConfig
from epd_serve.rpc.admin import AdminClient, AdminError, AdminRefused
from epd_serve.types import Stage

logger = logging.getLogger(__name__)

#: Beyond its deadline: time to build the new stages.
_REBUILD_S = 60.0
_TIMEOUT_S = 10.0
#: Beyond an order's deadline: time to build the new stages, or the old ones again.
_ORDER_MARGIN_S = 130.0
#: Size that 'epd-serve plan' assumes for an unknown image (EPD-Serve, section 4.1).
_IMAGE_PIXELS = 802 * 652
#: HTTP statuses of permanent refusals.
_PERMANENT = (400, 404)


class RoleLoop:
    """Decides every ``interval_s``; reports orders and the first of equal decisions."""

    def __init__(self, config: DeploymentConfig, admin: AdminClient) -> None:
        slo = config.slo
        assert slo.ttft_ms is not None and slo.tpot_ms is not None
        assert config.elastic is not None
        self._options = config.elastic
        self._admin = admin
        self._controller = Controller(
            self._options,
            Limits(ttft_s=slo.ttft_ms / 1e3, tpot_s=slo.tpot_ms / 1e3),
            needed=tuple(stage for stage in Stage if stage in config.topology.stages),
            rebuild_s=_REBUILD_S,
        )
        self._last: Kind | None = None

    async def run(self) -> None:
        """Run until cancelled, which leaves open orders to their deadline."""
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(self._options.interval_s)
                decision = await self._decide()
                if (noted := self._note(decision)) is not None:
                    with suppress(AdminError):
                        await _ask(self._admin, "POST", "/elastic", noted)
                if decision.order is not None:
                    group.create_task(self._carry_out(decision.order))

    async def _decide(self) -> Decision:
        """Decide on the current instances; without an answer decide nothing."""
        try:
            answer = await _ask(self._admin, "GET", "/load")
            return self._controller.decide(time.monotonic(), from_json(answer["instances"]))
        except AdminError as error:
            level = logging.DEBUG if self._last is Kind.UNDECIDED else logging.WARNING
            logger.log(level, "elastic: no decision: %s", error)
            return Decision(at_s=time.monotonic(), kind=Kind.UNDECIDED, reason=str(error))

    def _note(self, decision: Decision) -> dict[str, Any] | None:
        """Log a decision and return it for the report; None if it repeats the previous one."""
        order = decision.order
        if decision.kind is self._last and order is None:
            return None
        self._last = decision.kind
        quiet = decision.kind in (Kind.CALM, Kind.UNDECIDED)
        logger.log(logging.DEBUG if quiet else logging.INFO, "elastic: %s", decision.reason)
        return {
            "time": time.time(),
            "kind": decision.kind.value,
            "reason": decision.reason,
            "order": None if order is None else {"instance": order.instance, "role": str(order.role)},
            "pressures": {stage.value: round(value, 3) for stage, value in decision.pressures.items()},
        }

    async def _carry_out(self, order: Order) -> None:
        try:
            body = {"role": str(order.role), "deadline_s": DEADLINE_S}
            path = f"/instances/{order.instance}/role"
            await _ask(self._admin, "POST", path, body, timeout_s=DEADLINE_S + _ORDER_MARGIN_S)
        except AdminError as error:
            is_final = isinstance(error, AdminRefused) and error.status in _PERMANENT
            (self._controller.refused if is_final else self._controller.failed)(order)
            verb = "cannot become" if is_final else "did not become"
            logger.warning("elastic: %s %s %s: %s", order.instance, verb, order.role, error)
        else:
            logger.info("elastic: %s serves %s", order.instance, order.role)


async def _ask(
    admin: AdminClient, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float = _TIMEOUT_S
) -> Any:
    """Return the answer of the admin API. Raises AdminError, also if it does not answer in time."""
    try:
        return await admin.ask(method, path, body, timeout_s)
    except TimeoutError as error:
        raise AdminError("the gateway does not answer") from error


async def autoscale(config: DeploymentConfig, admin: AdminClient) -> None:
    """Switch roles by load and log drift, until cancelled; ``config`` needs a section ``elastic``."""
    async with asyncio.TaskGroup() as group:
        group.create_task(RoleLoop(config, admin).run())
        group.create_task(_watch_drift(config, admin))


async def _watch_drift(config: DeploymentConfig, admin: AdminClient) -> None:
    """Watch the gateway's served requests and log each drift with a command for a new plan."""
    assert config.elastic is not None
    detector, last, problem = DriftDetector(), 0, ""
    while True:
        before, problem = problem, ""
        try:
            answer = await _ask(admin, "GET", f"/requests/served?after={last}")
            last = answer["last"]
            for request in answer["requests"]:
                if drifts := detector.observe(msgspec.convert(request, ServedRequest)):
                    tokens_per_pixel = (await _ask(admin, "GET", "/load"))["tokens_per_pixel"]
                    command = _plan_command(config, round(tokens_per_pixel * _IMAGE_PIXELS))
                    logger.warning("elastic: the load has drifted: %s; run %s", "; ".join(drifts), command)
        except AdminError as error:
            problem = str(error)
            if problem != before:
                logger.warning("elastic: cannot read served requests: %s", problem)
        await asyncio.sleep(config.elastic.interval_s)


def _plan_command(config: DeploymentConfig, image_tokens: int) -> str:
    log, slo = config.gateway.access_log, config.slo
    trace = "ACCESS_LOG" if log in (None, "-") else log
    return (
        f"epd-serve plan --workload trace:{trace} --devices devices.yaml "
        f"--slo ttft={slo.ttft_ms:g},tpot={slo.tpot_ms:g} --image-tokens {image_tokens} -o plan.yaml, "
        "then epd-serve apply --topology with the topology of plan.yaml"
    )
