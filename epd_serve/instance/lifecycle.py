"""An instance drains: to take another role, to leave the deployment, or because its process ends."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from enum import StrEnum
from typing import TYPE_CHECKING

from device.base import BareDevice, DeviceLost
from epd_serve.errors import Conflict, InvalidRequest, ServeError, StageTimeout
from epd_serve.protocol import instance_state
from epd_serve.types import Role

if TYPE_CHECKING:
    from epd_serve.instance.instance import Instance


logger = logging.getLogger(__name__)

_TICK_S = 0.005
#: An empty process is ended at once, unless whoever had it leave is gone: then it serves again.
_EMPTY_S = 30.0


class SwitchState(StrEnum):
    """The states of an instance's change of role."""

    SERVING = "SERVING"
    DRAINING = "DRAINING"  # takes nothing new; what is here ends, or goes on elsewhere
    REBUILDING = "REBUILDING"  # is empty; stages and caches of the other role are made


class Lifecycle:
    """Carries out orders to switch (001 EPD, section 3.2.4) and to leave, one at a time. For the event loop.

    Attributes:
        role: the role that it serves, or served last.
        epoch: number of times its stages were rebuilt; a new epoch makes callers' knowledge of its caches void.
        settled: set while no switch is under way.
    """

    def __init__(self, instance: Instance, role: Role) -> None:
        self.role = role
        self.state = SwitchState.SERVING
        self.epoch = 0
        self._instance = instance
        self._is_called_back = self._is_draining_to_leave = self._is_ending = False
        self.settled = asyncio.Event()
        self.settled.set()
        self._rebuilding: asyncio.Task[None] | None = None
        self._empty: asyncio.TimerHandle | None = None

    @property
    def is_leaving(self) -> bool:
        """Whether it takes nothing new because its process is to end."""
        return self._is_ending or self._is_draining_to_leave or self._empty is not None

    async def switch(self, order: instance_state.RoleOrder) -> instance_state.RoleChanged:
        """Return when the instance serves the role. Cancelled while it drains, it goes on in its old one.

        Raises:
            InvalidRequest: it cannot have that role.
            Conflict: it is leaving or on its way to another, or was called back.
            StageTimeout: something was still there at the deadline; it serves its old role again.
            ServeError: the stages could not be made; likewise.
        """
        self._instance.check_ready()
        old, began = self.role, time.monotonic()
        try:
            role = Role.parse(order.role)
            self._instance.check_role(role)
        except ValueError as error:
            raise InvalidRequest(str(error), param="role") from error
        if role == old:
            if self.state is SwitchState.DRAINING:
                self._is_called_back = True
                await self.settled.wait()
            return instance_state.RoleChanged(str(role), str(role), self.epoch, time.monotonic() - began)
        if self.state is not SwitchState.SERVING:
            raise Conflict(f"it is {self.state} on its way from {old} to another role")
        if self.is_leaving:
            raise Conflict("it is leaving; it takes no other role")
        logger.info("role %s → %s: draining", old, role)
        self.state = SwitchState.DRAINING
        self.settled.clear()
        try:
            drain_s = await self._drain(order)
        except BaseException:
            logger.info("role %s stays", old)
            self._settle(old)
            raise
        self.state = SwitchState.REBUILDING
        self._instance.state_changed()
        self._rebuilding = asyncio.create_task(self._rebuild(role))
        await asyncio.shield(self._rebuilding)
        seconds = time.monotonic() - began
        logger.info("role %s → %s in %.3f s, %.3f s of it to drain", old, role, seconds, drain_s)
        return instance_state.RoleChanged(str(old), str(role), self.epoch, seconds, drain_s)

    async def leave(self, order: instance_state.LeaveOrder) -> instance_state.Left:
        """Return when nothing is left. Cancelled before, it serves on; not stopped afterwards, it serves again.

        Raises:
            Unavailable: it is loading its model.
            Conflict: it is on its way to another role, or somebody else has it leave.
            StageTimeout: something was still there at the deadline; it serves on.
        """
        self._instance.check_started()
        if self.state is not SwitchState.SERVING:
            raise Conflict("it is on its way to another role")
        if self._is_draining_to_leave:
            raise Conflict("it is leaving already")
        if self._empty is not None:
            self._empty.cancel()
            self._empty = None
        logger.info("leaving: draining")
        self._is_draining_to_leave = True
        try:
            seconds = await self._drain(order)
            self._empty = asyncio.get_running_loop().call_later(_EMPTY_S, self._stay)
        finally:
            self._is_draining_to_leave = False
            self._instance.state_changed()
        logger.info("leaving: empty after %.3f s", seconds)
        return instance_state.Left(seconds)

    async def end(self) -> None:
        """Take nothing new from now on; return when the answers that are here have ended."""
        self._is_ending = True
        self._instance.state_changed()
        while any(self._instance.in_use().values()):  # noqa: ASYNC110 - work ends in many places
            await asyncio.sleep(_TICK_S)

    def _stay(self) -> None:
        logger.info("leaving: it stays")
        self._empty = None
        self._instance.state_changed()

    async def _drain(self, order: instance_state.RoleOrder | instance_state.LeaveOrder) -> float:
        """Send work away: what has not begun at once, the rest when its patience ends. Return the seconds taken.

        Raises:
            Conflict: it was called back to its role.
            StageTimeout: something was still there at the deadline.
        """
        began, patience_s = time.monotonic(), min(order.patience_s, order.deadline_s / 2)
        self._is_called_back = False
        self._instance.state_changed()
        while True:
            if self._is_called_back:
                raise Conflict(f"it was called back to role {self.role}")
            seconds = time.monotonic() - began
            self._instance.send_away(begun=seconds >= patience_s)
            in_use = {what: count for what, count in self._instance.in_use().items() if count}
            if not in_use:
                return seconds
            if seconds >= order.deadline_s:
                left = ", ".join(f"{count} {what}" for what, count in in_use.items())
                raise StageTimeout(
                    f"after {order.deadline_s:g} s there is still something to do ({left}); role "
                    f"{self.role} is served on"
                )
            await asyncio.sleep(_TICK_S)

    async def _rebuild(self, role: Role) -> None:
        """Make the stages of the role, or else those of the old one; nobody may wait for the order any more."""
        old = self.role
        try:
            await self._instance.rebuild(role)
        except Exception as error:
            logger.exception("role %s cannot be served", role)
            try:
                await self._instance.rebuild(old)
            except Exception:
                logger.critical("neither role %s nor role %s can be served", role, old, exc_info=True)
                end_process()
            self.epoch += 1
            self._settle(old)
            raise ServeError(f"role {role} cannot be served ({error}); role {old} is served on") from error
        self.epoch += 1
        self._settle(role)

    def _settle(self, role: Role) -> None:
        """Serve a role from now on."""
        self.role = role
        self.state = SwitchState.SERVING
        self.settled.set()
        self._instance.state_changed()


def end_process() -> None:
    """End this process at once, where it cannot go on: whoever started it starts it again."""
    logging.shutdown()
    os._exit(1)


def end_if_lost(device: BareDevice) -> None:
    """End this process where its device is lost, since no step on it will succeed again."""
    try:
        device.check()
    except DeviceLost as error:
        logger.critical("%s; this process ends", error)
        end_process()
