"""An instance takes another role, or leaves: it drains, and then it is rebuilt or ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from epd_serve.config.role_files import in_role
from epd_serve.errors import Conflict, InvalidRequest, ServeError, StageTimeout
from epd_serve.instance.http import Handler, Reply
from epd_serve.protocol import wire
from epd_serve.topology import RoleSwitch, SwitchState
from epd_serve.types import Role

if TYPE_CHECKING:
    from epd_serve.instance.instance import Instance

logger = logging.getLogger(__name__)

_TICK_S = 0.005
#: An empty process is ended at once, unless whoever had it leave is gone: then it serves again.
_EMPTY_S = 30.0


class Lifecycle:
    """Carries orders to switch and to leave out, one at a time; it belongs to the event loop.

    Attributes:
        machine: the role, and where the instance is on its way to another.
        is_leaving: whether it drains before its process ends (SIGTERM), or is empty; it takes nothing new.
    """

    def __init__(self, instance: Instance, role: Role, clock: Callable[[], float] = time.monotonic) -> None:
        self.machine = RoleSwitch(role)
        self.is_leaving = False
        self._instance = instance
        self._clock = clock
        self._called_back = asyncio.Event()
        self._settled = asyncio.Event()
        self._settled.set()
        self._rebuilding: asyncio.Task[None] | None = None
        self._is_draining_to_leave = False
        self._empty: asyncio.TimerHandle | None = None

    def routes(self) -> list[tuple[str, str, Handler]]:
        """(method, path, handler)."""
        return [("POST", "/role", self._role), ("POST", "/leave", self._leave)]

    async def _role(self, body: bytes) -> Reply:
        return Reply(body=wire.encode(await self.switch(wire.decode(body, wire.RoleOrder))))

    async def _leave(self, body: bytes) -> Reply:
        return Reply(body=wire.encode(await self.leave(wire.decode(body, wire.LeaveOrder))))

    async def settled(self) -> None:
        """Return when no switch is under way."""
        await self._settled.wait()

    async def switch(self, order: wire.RoleOrder) -> wire.RoleChanged:
        """Return when the instance serves the role. Cancelled while it drains, it goes on in its old one.

        Raises:
            InvalidRequest: it cannot have that role.
            Conflict: it is leaving or on its way to another, or was called back.
            StageTimeout: something was still there at the deadline; it serves its old role again.
            ServeError: the stages could not be made; likewise.
        """
        self._instance.check_ready()
        machine, role, began = self.machine, _parse(order.role), self._clock()
        if role == machine.role:
            if machine.state is SwitchState.DRAINING:
                self._called_back.set()
                await self._settled.wait()
            elif not machine.is_serving:
                raise Conflict(f"the stages of role {machine.wanted} are being made; wait for them")
            return wire.RoleChanged(str(role), str(role), machine.epoch, self._clock() - began)
        if not machine.is_serving:
            raise Conflict(f"it is {machine.state} on its way from {machine.role} to {machine.wanted}")
        if self._instance.draining:
            raise Conflict("it is leaving; it takes no other role")
        try:
            in_role(self._instance.options, role)
        except ValueError as error:
            raise InvalidRequest(str(error), param="role") from error
        old = machine.role
        machine.order(role)
        logger.info("role %s → %s: draining", old, role)
        self._settled.clear()
        self._called_back.clear()
        try:
            self._instance.state_changed()
            drain_s = await self._drain(order, began)
            machine.drained()
            self._instance.state_changed()
            self._rebuilding = asyncio.create_task(self._rebuild(role))
            await asyncio.shield(self._rebuilding)
        finally:
            if machine.state is SwitchState.DRAINING:
                machine.call_back()
                logger.info("role %s stays", old)
            if machine.is_serving:
                self._settle()
        seconds = self._clock() - began
        logger.info("role %s → %s in %.3f s, %.3f s of it to drain", old, role, seconds, drain_s)
        return wire.RoleChanged(str(old), str(role), machine.epoch, seconds, drain_s)

    async def leave(self, order: wire.LeaveOrder) -> wire.Left:
        """Return when nothing is left. Cancelled before, it serves on; not stopped afterwards, it serves again.

        Raises:
            Unavailable: it is loading its model.
            Conflict: it is on its way to another role, or somebody else has it leave.
            StageTimeout: something was still there at the deadline; it serves on.
        """
        self._instance.check_started()
        if not self.machine.is_serving:
            raise Conflict("it is on its way to another role")
        if self._is_draining_to_leave:
            raise Conflict("it is leaving already")
        if self._empty is not None:
            self._empty.cancel()
        self._is_draining_to_leave = self.is_leaving = True
        self._called_back.clear()
        logger.info("leaving: draining")
        try:
            self._instance.state_changed()
            seconds = await self._drain(order, self._clock())
        except BaseException:
            self._stay()
            raise
        finally:
            self._is_draining_to_leave = False
        self._empty = asyncio.get_running_loop().call_later(_EMPTY_S, self._stay)
        logger.info("leaving: empty after %.3f s", seconds)
        return wire.Left(seconds)

    def _stay(self) -> None:
        logger.info("leaving: it stays")
        self.is_leaving = False
        self._instance.state_changed()

    async def _drain(self, order: wire.RoleOrder | wire.LeaveOrder, began: float) -> float:
        """Send work away, more of it as the deadline comes nearer; the seconds until nothing was left."""
        deadline, patience = began + order.deadline_s, began + min(order.patience_s, order.deadline_s / 2)
        while True:
            if self._called_back.is_set():
                raise Conflict(f"it was called back to role {self.machine.role}")
            now = self._clock()
            self._instance.send_away(begun=now >= patience, late=now >= (patience + deadline) / 2)
            in_use = {what: count for what, count in self._instance.in_use().items() if count}
            if not in_use:
                return now - began
            if now >= deadline:
                left = ", ".join(f"{count} {what}" for what, count in in_use.items())
                raise StageTimeout(
                    f"after {order.deadline_s:g} s there is still something to do ({left}); role "
                    f"{self.machine.role} is served on"
                )
            try:
                async with asyncio.timeout(_TICK_S):
                    await self._called_back.wait()
            except TimeoutError:
                continue

    async def _rebuild(self, role: Role) -> None:
        machine, old = self.machine, self.machine.role
        try:
            try:
                await self._instance.rebuild(role)
            except Exception as error:
                logger.exception("role %s cannot be served", role)
                await self._instance.rebuild(old)
                machine.rebuilt(old)
                raise ServeError(f"role {role} cannot be served ({error}); role {old} is served on") from error
            machine.rebuilt(role)
        except ServeError:
            raise
        except BaseException:
            logger.critical("neither role %s nor role %s can be served", role, old, exc_info=True)
            self._instance.end_process()
            raise
        finally:
            self._settle()  # here as well: nobody may wait for the order any more

    def _settle(self) -> None:
        self._settled.set()
        self._instance.state_changed()


def _parse(text: str) -> Role:
    try:
        return Role.parse(text)
    except ValueError as error:
        raise InvalidRequest(str(error), param="role") from error
