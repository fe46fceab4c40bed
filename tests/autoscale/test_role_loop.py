"""The loop that runs the controller live: a real table, real orders' outcomes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from instance_info import instance_info

from epd_serve.autoscale.controller import Order
from epd_serve.autoscale.instance_load import InstanceLoad, from_json, instance_loads, to_json
from epd_serve.autoscale.role_loop import RoleLoop
from epd_serve.config import DeploymentConfig
from epd_serve.protocol.instance_state import InstanceInfo, Load
from epd_serve.routing.table import InstanceTable
from epd_serve.rpc.admin import AdminClient, AdminRefused, AdminUnreachable
from epd_serve.types import StageRate

SLO = {"ttft_ms": 2000, "tpot_ms": 50}
GiveOrder = Callable[[Order], Awaitable[None]]
Look = Callable[[], Awaitable[Sequence[InstanceLoad]]]
OPTIONS = {"enabled": True, "cooldown_s": 0.05, "interval_s": 0.01}


class Looping(RoleLoop):
    """A loop over a table, with the decisions that it reported."""

    def __init__(self, here: InstanceTable, give: GiveOrder, look: Look | None = None, **options: Any) -> None:
        config = DeploymentConfig.model_validate({"slo": SLO, "elastic": OPTIONS | options})
        super().__init__(config, AdminClient("http://127.0.0.1:1"))
        self.here, self.give, self.look_at = here, give, look
        self.decisions: list[dict[str, Any]] = []

    async def look(self) -> Sequence[InstanceLoad]:
        return await self.look_at() if self.look_at else from_json(to_json(instance_loads(self.here)))

    async def report(self, decision: dict[str, Any]) -> None:
        self.decisions.append(decision)


def info(name: str, role: str, num_running: int = 0) -> InstanceInfo:
    return instance_info(name, role, load=Load(num_running=num_running, rates={"D": StageRate(0.02, 0.001)}))


def table(roles: dict[str, str], num_running: int) -> InstanceTable:
    made = InstanceTable([(name, "") for name in roles])
    for name, role in roles.items():
        made.update(name, info(name, role, num_running if role == "D" else 0), contains=0)
    return made


async def run_until(looping: Looping, condition: Callable[[], bool]) -> None:
    running = asyncio.create_task(looping.run())
    try:
        async with asyncio.timeout(300):
            while not condition():
                assert not running.done(), running.exception()
                await asyncio.sleep(0.005)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_late_stage_gets_an_instance_and_the_admin_plane_says_why() -> None:
    here, given = table({"e0": "E", "e1": "E", "p0": "P", "d0": "D"}, num_running=100), []

    async def give(order: Order) -> None:
        here["e0"].drains.add("operator")
        await asyncio.sleep(0.05)
        here.update(order.instance, info(order.instance, str(order.role), 10), contains=0)
        here.update("d0", info("d0", "D", 10), contains=0)
        here["e0"].drains.clear()
        given.append((order.instance, str(order.role)))

    loop = Looping(here, give)
    await run_until(loop, lambda: bool(given) and loop.decisions[-1]["kind"] == "calm")
    assert given == [("e0", "D")]
    switch = next(one for one in loop.decisions if one["order"])
    assert switch["order"] == {"instance": "e0", "role": "D"}
    assert switch["pressures"]["D"] == 2.4


@pytest.mark.parametrize(
    ("error", "again"),
    [(AdminRefused(400, "e0 has no weights"), False), (AdminRefused(503, "it drains"), True)],
)
async def test_an_order_that_fails_is_given_again_unless_it_cannot_be(error: Exception, again: bool) -> None:
    given: list[str] = []

    async def give(order: Order) -> None:
        given.append(order.instance)
        raise error

    here = table({"e0": "E", "e1": "E", "p0": "P", "d0": "D"}, num_running=100)
    loop = Looping(here, give)
    await run_until(loop, lambda: len(given) == 2)
    assert given == ["e0", "e0" if again else "e1"]


@pytest.mark.parametrize(
    ("fault", "reason", "level"),
    [
        (ValueError("no table"), "ValueError: no table", logging.ERROR),
        (AdminUnreachable("nothing answers"), "nothing answers", logging.WARNING),
        (TimeoutError(), "the gateway does not answer", logging.WARNING),
    ],
)
async def test_a_moment_that_cannot_be_judged_is_not_the_last_and_a_row_of_them_is_said_once(
    fault: Exception, reason: str, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    here, looks = table({"e0": "E", "p0": "P", "d0": "D"}, num_running=0), 0

    async def look() -> list[InstanceLoad]:
        nonlocal looks
        looks += 1
        if looks <= 5:
            raise fault
        return instance_loads(here)

    loop = Looping(here, never, look)
    await run_until(loop, lambda: len(loop.decisions) > 1)
    assert [one["kind"] for one in loop.decisions] == ["undecided", "calm"]
    assert loop.decisions[0]["reason"] == reason
    assert [record.levelno for record in caplog.records if record.levelno > logging.INFO] == [level]


async def never(order: Order) -> None:
    raise AssertionError(order)


async def test_a_dry_run_gives_no_order() -> None:
    here = table({"e0": "E", "e1": "E", "p0": "P", "d0": "D"}, num_running=100)
    loop = Looping(here, never, dry_run=True)
    await run_until(loop, lambda: any(one["order"] for one in loop.decisions))
