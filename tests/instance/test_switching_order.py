"""The way of one order, whatever happens at the same moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from epd_serve.config import InstanceOptions
from epd_serve.errors import Conflict
from epd_serve.instance.lifecycle import DrainReason, Lifecycle, SwitchState
from epd_serve.protocol import instance_state
from epd_serve.types import Role


class Stages:
    """Has one thing to do when it is first asked, and nothing afterwards."""

    def __init__(self, when_asked: Callable[[], object]) -> None:
        self.options = InstanceOptions(name="p0", role=Role.parse("P"), model=Path("m"), served_model_name="m")
        self.when_asked = when_asked
        self.num_asked = 0
        self.rebuilt: list[str] = []

    def check_ready(self) -> None: ...

    def state_changed(self) -> None: ...

    def check_role(self, role: Role) -> None: ...

    def send_away(self, *, begun: bool) -> None: ...

    def in_use(self) -> dict[str, int]:
        self.num_asked += 1
        if self.num_asked == 1:
            self.when_asked()
        return {"calls": int(self.num_asked == 1)}

    async def rebuild(self, role: Role) -> None:
        self.rebuilt.append(str(role))


async def test_a_call_back_in_the_moment_that_the_last_work_ends_is_heard() -> None:
    """The loop stands still until its tick is over; then come the call-back and the tick, in this order."""
    loop, calls = asyncio.get_running_loop(), list[asyncio.Task[instance_state.RoleChanged]]()

    def stand_still() -> None:
        time.sleep(0.05)
        calls.append(loop.create_task(lifecycle.switch(instance_state.RoleOrder(role="P"))))

    stages = Stages(lambda: loop.call_soon(stand_still))
    lifecycle = Lifecycle(stages, stages.options.role)
    with pytest.raises(Conflict, match="called back"):
        await lifecycle.switch(instance_state.RoleOrder(role="D"))
    back = await calls[0]
    assert (back.old, back.new) == ("P", "P")
    assert stages.rebuilt == [] and str(lifecycle.role) == "P" and lifecycle.state is SwitchState.SERVING


async def test_one_that_leaves_takes_no_other_role() -> None:
    stages = Stages(lambda: None)
    lifecycle = Lifecycle(stages, stages.options.role)
    lifecycle._draining.add(DrainReason.END)
    with pytest.raises(Conflict, match="leaving"):
        await lifecycle.switch(instance_state.RoleOrder(role="D"))
    assert lifecycle.state is SwitchState.SERVING and stages.num_asked == 0
    lifecycle._draining.clear()
    assert (await lifecycle.switch(instance_state.RoleOrder(role="D"))).new == "D"
