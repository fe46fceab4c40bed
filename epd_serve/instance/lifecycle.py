"""Drain an instance to switch its role, to leave the deployment, or to stop the process."""

from __future__ import annotations

import asyncio
import logging
import time
from enum import StrEnum
from typing import TYPE_CHECKING

from epd_serve.engine import pace
from epd_serve.errors import Conflict, InvalidRequest, ServeError, StageTimeout
from epd_serve.protocol import instance_state
from epd_serve.types import Role

if TYPE_CHECKING:
    from epd_serve.instance.instance import Instance


logger = logging.getLogger(__name__)

_TICK_S = 0.005
#: How long a drained instance waits to be stopped before it serves again: the process that ordered it to leave may
#: be gone.
_EMPTY_S = 30.0


class SwitchState(StrEnum):
    """States of a role switch."""

    SERVING = "SERVING"
    DRAINING = "DRAINING"  # accepts nothing new; running requests end, or continue elsewhere
    REBUILDING = "REBUILDING"  # drained; building the stages and caches of the new role


class Lifecycle:
    """Executes orders to switch roles (001 EPD, section 3.2.4) and to leave, one at a time, on the event loop.

    Attributes:
        role: current role, or the old one during a switch.
        epoch: number of rebuilds; a new epoch invalidates callers' knowledge of the instance's caches.
        settled: set while no switch is in progress.
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
        """True if the instance refuses new work because its process is about to stop."""
        return self._is_ending or self._is_draining_to_leave or self._empty is not None

    async def switch(self, order: instance_state.RoleOrder) -> instance_state.RoleChanged:
        """Switch to a role; return once the instance serves it. If cancelled while draining, keep the old role.

        Raises:
            InvalidRequest: the instance does not support that role.
            Conflict: it is leaving or switching already, or the switch was cancelled by another order.
            StageTimeout: it did not drain by the deadline and keeps its old role.
            ServeError: the new stages could not be built; it serves its old role again.
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
            return instance_state.RoleChanged(str(role), str(role), time.monotonic() - began)
        if self.state is not SwitchState.SERVING:
            raise Conflict(f"the instance is {self.state} to switch from role {old}")
        if self.is_leaving:
            raise Conflict("the instance is leaving and cannot switch roles")
        logger.info("role %s → %s: draining", old, role)
        self.state = SwitchState.DRAINING
        self.settled.clear()
        try:
            drain_s = await self._drain(order)
        except BaseException:
            logger.info("keeping role %s", old)
            self._settle(old)
            raise
        self.state = SwitchState.REBUILDING
        self._instance.state_changed()
        self._rebuilding = asyncio.create_task(self._rebuild(role))
        await asyncio.shield(self._rebuilding)
        seconds = time.monotonic() - began
        logger.info("role %s → %s in %.3f s, including %.3f s to drain", old, role, seconds, drain_s)
        return instance_state.RoleChanged(str(old), str(role), seconds, drain_s)

    async def leave(self, order: instance_state.LeaveOrder) -> instance_state.Left:
        """Drain to leave; return once drained. If cancelled, or not stopped afterwards, the instance serves again.

        Raises:
            Unavailable: the instance is loading its model.
            Conflict: it is switching roles, or another order to leave is in progress.
            StageTimeout: it did not drain by the deadline and serves again.
        """
        self._instance.check_started()
        if self.state is not SwitchState.SERVING:
            raise Conflict("the instance is switching roles")
        if self._is_draining_to_leave:
            raise Conflict("the instance is already leaving")
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
        logger.info("leaving: drained in %.3f s", seconds)
        return instance_state.Left(seconds)

    async def end(self) -> None:
        """Accept no new requests from now on; return once all running requests have ended.

        Cancels a switch that is draining.
        """
        self._is_ending = True
        self._is_called_back = self.state is SwitchState.DRAINING
        self._instance.state_changed()
        while any(self._instance.in_use().values()):  # noqa: ASYNC110 - work ends in many places
            await asyncio.sleep(_TICK_S)

    def _stay(self) -> None:
        logger.info("not stopped after leaving; serving again")
        self._empty = None
        self._instance.state_changed()

    async def _drain(self, order: instance_state.RoleOrder | instance_state.LeaveOrder) -> float:
        """Send away waiting requests at once and running ones after ``patience_s``; return the seconds taken.

        Raises:
            Conflict: another order cancelled the switch.
            StageTimeout: requests were left at the deadline.
        """
        began, patience_s = time.monotonic(), min(order.patience_s, order.deadline_s / 2)
        self._is_called_back = False
        self._instance.state_changed()
        while True:
            if self._is_called_back:
                raise Conflict(f"the switch was cancelled; the instance keeps role {self.role}")
            seconds = time.monotonic() - began
            self._instance.send_away(begun=seconds >= patience_s)
            in_use = {what: count for what, count in self._instance.in_use().items() if count}
            if not in_use:
                return seconds
            if seconds >= order.deadline_s:
                left = ", ".join(f"{count} {what}" for what, count in in_use.items())
                raise StageTimeout(
                    f"not drained after {order.deadline_s:g} s ({left} left); the instance keeps role {self.role}"
                )
            await asyncio.sleep(_TICK_S)

    async def _rebuild(self, role: Role) -> None:
        """Build the stages of the role, or rebuild the old ones on failure, even if the order was cancelled."""
        old = self.role
        try:
            await self._instance.rebuild(role)
        except Exception as error:
            logger.exception("role %s cannot be served", role)
            try:
                await self._instance.rebuild(old)
            except Exception:
                logger.critical("neither role %s nor role %s can be served", role, old, exc_info=True)
                pace.end_process()
            self.epoch += 1
            self._settle(old)
            raise ServeError(f"role {role} cannot be served ({error}); the instance keeps role {old}") from error
        self.epoch += 1
        self._settle(role)

    def _settle(self, role: Role) -> None:
        """End a switch by serving a role."""
        self.role = role
        self.state = SwitchState.SERVING
        self.settled.set()
        self._instance.state_changed()
