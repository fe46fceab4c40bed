"""The launcher's part of the admin API: departures, files that are taken over or checked, a controller held up."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from epd_serve.errors import Conflict
from epd_serve.launch.rollout import Deadline, GatewayOrders, OrderRefused
from epd_serve.protocol import instance_state, wire
from epd_serve.protocol.instance_state import Left
from epd_serve.rpc.admin import AdminUnreachable
from epd_serve.types import Stage
from proxy.admin.plane import create_admin_app, running_on_path
from proxy.admin.rollout import GatewayFiles, files_router, rollout_router
from proxy.admin.switches import Hold, switches_router


class Launched:
    """A gateway with such a socket, and what its router was told."""

    def __init__(self, gateway: Any, path: Path) -> None:
        self.gateway = gateway
        self.path = path
        self.orders = GatewayOrders(path, cast(Any, None))
        self.hold = Hold()
        self.reloads = 0
        self.refusal = ""

    def reload(self) -> None:
        if self.refusal:
            raise ValueError(self.refusal)
        self.reloads += 1

    def app(self) -> Any:
        state = self.gateway.app.state
        files = GatewayFiles(self.path, self.reload, lambda config: [config.model_name])
        router = rollout_router(state.table, state.switches, self.hold)
        roles = switches_router(state.switches, self.hold)
        return create_admin_app(state.table, state.admission, None, [roles, router, files_router(files)])


def leaves(instance: Any, when: asyncio.Event | None = None) -> None:
    """As one that is empty at once, or then."""

    def script(order: instance_state.LeaveOrder) -> list[Any]:
        instance.info["ready"] = False
        return [*([] if when is None else [when.wait]), (200, {}), wire.encode(Left(0.25))]

    instance.scripts["/leave"] = script


def ready(gateway: Any) -> list[str]:
    return [record.name for record in gateway.table.ready(Stage.PREFILL)]


@pytest.fixture
async def launched(start: Any) -> AsyncIterator[Launched]:
    gateway = await start("p0:P", "p1:P", "d0:D")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        launched = Launched(gateway, Path(folder) / "orders")
        launched.path.touch()  # of a gateway that was killed
        async with running_on_path(launched.app(), launched.path):
            yield launched


async def test_an_instance_leaves_unless_it_is_the_last_of_its_stage(launched: Launched) -> None:
    gateway, orders = launched.gateway, launched.orders
    leaves(gateway["p1"])
    answer = await orders.give("POST", "/instances/p1/leave", {"deadline_s": 5, "patience_s": 0}, Deadline(600))
    assert answer == {"instance": "p1", "seconds": 0.25}
    assert gateway["p1"].got("/leave") == [instance_state.LeaveOrder(deadline_s=5, patience_s=0)]
    assert ready(gateway) == ["p0"]
    with pytest.raises(Conflict, match="the only one that is ready for stage D"):
        await launched.gateway.app.state.switches.leave("d0", instance_state.LeaveOrder())
    assert not gateway.table["d0"].drains
    with pytest.raises(OrderRefused, match="there are: p0, p1, d0"):
        await orders.give("POST", "/instances/x9/leave", {}, Deadline(10))


async def test_one_that_left_and_is_not_ended_gets_work_again(launched: Launched) -> None:
    gateway = launched.gateway
    leaves(gateway["p1"])
    await launched.gateway.app.state.switches.leave("p1", instance_state.LeaveOrder())
    assert ready(gateway) == ["p0"]
    gateway["p1"].info["ready"] = True  # whoever had it leave is gone
    await gateway.until(lambda: ready(gateway) == ["p0", "p1"])


async def test_one_that_does_not_get_empty_gets_work_again(launched: Launched, kit: Any) -> None:
    launched.gateway["p1"].scripts["/leave"] = lambda _: kit.fail(504, "3 calls are left")
    with pytest.raises(OrderRefused, match="3 calls are left"):
        await launched.orders.give("POST", "/instances/p1/leave", {}, Deadline(10))
    assert not launched.gateway.table["p1"].drains


async def test_one_whose_caller_is_gone_gets_work_again(launched: Launched, kit: Any) -> None:
    gateway, path = launched.gateway, "/instances/p1/leave"
    p1, record = gateway["p1"], gateway.table["p1"]
    p1.scripts["/leave"] = lambda _: [kit.FOREVER]
    asking = asyncio.create_task(launched.orders.give("POST", path, {"deadline_s": 600}, Deadline(600)))
    await gateway.until(lambda: bool(p1.got("/leave")))
    assert record.drains
    asking.cancel()
    await gateway.until(lambda: not record.drains and bool(p1.cancelled))
    assert len(p1.got("/leave")) == 1
    p1.scripts["/leave"] = lambda _: [(200, {}), wire.encode(Left(0.25))]
    assert (await launched.orders.give("POST", path, {}, Deadline(10)))["seconds"] == 0.25


async def test_what_an_instance_is_told_ends_before_nobody_waits_for_it(launched: Launched, kit: Any) -> None:
    """And whoever waits hears what was in the way, though the last answer did not come."""
    p1 = launched.gateway["p1"]

    def script(_: Any) -> list[Any]:
        return kit.fail(409, "it is on its way to another role") if len(p1.got("/leave")) == 1 else [kit.FOREVER]

    p1.scripts["/leave"] = script
    for patience_s in (0.5, 5, 50):  # until the second call is there in time
        p1.calls.clear()
        with pytest.raises(OrderRefused) as refused:
            await launched.orders.give(
                "POST", "/instances/p1/leave", {"deadline_s": 60, "patience_s": 0}, Deadline(patience_s)
            )
        told = [order.deadline_s for order in p1.got("/leave")]
        if len(told) > 1:
            break
        await launched.gateway.until(lambda: not launched.gateway.table["p1"].drains)
    assert str(refused.value) == f"it is on its way to another role; {patience_s:g} s are over"
    assert 0 < told[1] < told[0] < patience_s, "each has what is left"


async def test_an_instance_has_one_order_at_a_time(launched: Launched, kit: Any) -> None:
    gateway, switches = launched.gateway, launched.gateway.app.state.switches
    p1, record, go_on = gateway["p1"], gateway.table["p1"], asyncio.Event()
    p1.scripts["/role"] = lambda _: [
        go_on.wait,
        (200, {}),
        wire.encode(instance_state.RoleChanged("P", "P", 0, 0.1)),
    ]
    switching = asyncio.create_task(switches.order("p1", instance_state.RoleOrder(role="D")))
    await gateway.until(lambda: bool(p1.got("/role")))
    with pytest.raises(Conflict, match="on its way from P to D"):
        await switches.leave("p1", instance_state.LeaveOrder())
    assert record.drains, "the switch goes on"
    go_on.set()
    await switching
    assert not record.drains and not p1.got("/leave")

    go_on.clear()
    leaves(p1, go_on)
    leaving = asyncio.create_task(switches.leave("p1", instance_state.LeaveOrder()))
    await gateway.until(lambda: bool(p1.got("/leave")))
    with pytest.raises(Conflict, match="is leaving"):
        await switches.order("p1", instance_state.RoleOrder(role="D"))
    with pytest.raises(Conflict, match="is leaving"):
        await switches.leave("p1", instance_state.LeaveOrder())
    assert record.drains, "it leaves on"
    go_on.set()
    assert await leaving == 0.25 and not record.ready
    assert len(p1.got("/role")) == len(p1.got("/leave")) == 1


async def test_files_and_the_controller(launched: Launched) -> None:
    orders = launched.orders
    await orders.give("POST", "/reload", {}, Deadline(10))
    assert launched.reloads == 1
    launched.refusal = "line 1: no such key"
    with pytest.raises(OrderRefused, match="no such key"):
        await orders.give("POST", "/reload", {}, Deadline(10))
    answer = await orders.give("POST", "/check", {"served_model_name": "new"}, Deadline(10))
    assert answer == {"left": ["new"]}
    with pytest.raises(OrderRefused, match="no_such_key"):
        await orders.give("POST", "/check", {"no_such_key": 1}, Deadline(10))
    for seconds in ("long", -1, 1e9):
        with pytest.raises(OrderRefused, match="the body is no HoldBody"):
            await orders.give("POST", "/hold", {"seconds": seconds}, Deadline(10))
    launched.hold.check()
    await orders.give("POST", "/hold", {"seconds": 60}, Deadline(10))
    with pytest.raises(Conflict, match="epd-serve apply"):
        launched.hold.check()
    p1 = launched.gateway["p1"]
    p1.scripts["/role"] = lambda _: [(200, {}), wire.encode(instance_state.RoleChanged("P", "D", 0, 0.1))]
    order = {"role": "D", "deadline_s": 5}
    with pytest.raises(OrderRefused, match="epd-serve apply"):
        await orders.give("POST", "/instances/p1/role", {**order, "automatic": True}, Deadline(0.3))
    assert not p1.got("/role")
    await orders.give("POST", "/instances/p1/role", order, Deadline(10))
    await orders.give("POST", "/hold", {"seconds": 0}, Deadline(10))
    launched.hold.check()
    await orders.is_ready("d0", Deadline(10))
    with pytest.raises(OrderRefused, match="has not found x9 ready"):
        await orders.is_ready("x9", Deadline(0.3))


async def test_a_gateway_that_is_starting_is_asked_again(start: Any) -> None:
    gateway = await start("a0:EPD")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        launched = Launched(gateway, Path(folder) / "orders")
        with pytest.raises(OrderRefused, match="the gateway does not answer"):
            await launched.orders.give("POST", "/reload", {}, Deadline(0.3))
        ask, refused_once = launched.orders.client.ask, asyncio.Event()

        async def asked(*arguments: Any) -> Any:
            try:
                return await ask(*arguments)
            finally:
                refused_once.set()

        launched.orders.client.ask = asked  # type: ignore[method-assign]
        asking = asyncio.create_task(launched.orders.give("POST", "/reload", {}, Deadline(60)))
        await refused_once.wait()
        async with running_on_path(launched.app(), launched.path):
            await asking
        assert launched.reloads == 1
        with pytest.raises(AdminUnreachable):
            await ask("POST", "/reload", {})


async def test_a_socket_that_cannot_be_is_said_before_anything_is_served(start: Any, tmp_path: Path) -> None:
    launched = Launched(await start("a0:EPD"), tmp_path / "nowhere" / "orders")
    with pytest.raises(ValueError, match=r"cannot listen at .*/nowhere/orders: No such file"):
        async with running_on_path(launched.app(), launched.path):
            pass
