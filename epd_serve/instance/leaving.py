"""An instance that is to be ended: what it has ends, or goes on elsewhere, as before another role."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from epd_serve.errors import Conflict, StageTimeout
from epd_serve.instance.http import Handler, Reply
from epd_serve.instance.switching import Switching
from epd_serve.protocol import wire

logger = logging.getLogger(__name__)

_TICK_S = 0.005
#: A process that is empty is ended at once, unless whoever had it leave is gone: then it serves again.
_EMPTY_S = 30.0


class Leaver(Protocol):
    """What leaves: see :class:`~epd_serve.instance.instance.Instance`."""

    switching: Switching

    def check_started(self) -> None: ...

    def state_changed(self) -> None: ...

    def send_away(self, *, begun: bool, late: bool) -> None: ...

    def in_use(self) -> dict[str, int]: ...


class Leaving:
    """Carries such an order out; the process goes on until it is stopped (SIGTERM).

    Attributes:
        is_on: whether it is leaving, or empty and about to be stopped; it takes nothing new.
    """

    def __init__(self, instance: Leaver, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_on = False
        self._instance = instance
        self._clock = clock
        self._is_under_way = False
        self._waiting: asyncio.TimerHandle | None = None

    def routes(self) -> list[tuple[str, str, Handler]]:
        """(method, path, handler)."""
        return [("POST", "/leave", self._leave)]

    async def _leave(self, body: bytes) -> Reply:
        return Reply(body=wire.encode(await self.leave(wire.decode(body, wire.LeaveOrder))))

    async def leave(self, order: wire.LeaveOrder) -> wire.Left:
        """Return when nothing is left. Cancelled before, it serves on; not stopped afterwards, it serves again.

        Raises:
            Unavailable: it is loading its model.
            Conflict: it is on its way to another role, or somebody else has it leave.
            StageTimeout: something was still there at the deadline; it serves on.
        """
        instance, began = self._instance, self._clock()
        instance.check_started()
        if not instance.switching.machine.is_serving:
            raise Conflict("it is on its way to another role")
        if self._is_under_way:
            raise Conflict("it is leaving already")
        if self._waiting is not None:
            self._waiting.cancel()
        self._is_under_way = self.is_on = True
        logger.info("leaving: draining")
        try:
            instance.state_changed()
            await self._drain(order, began)
        except BaseException:
            self._stay()
            raise
        finally:
            self._is_under_way = False
        self._waiting = asyncio.get_running_loop().call_later(_EMPTY_S, self._stay)
        seconds = self._clock() - began
        logger.info("leaving: empty after %.3f s", seconds)
        return wire.Left(seconds)

    def _stay(self) -> None:
        logger.info("leaving: it stays")
        self.is_on = False
        self._instance.state_changed()

    async def _drain(self, order: wire.LeaveOrder, began: float) -> None:
        deadline, patience = began + order.deadline_s, began + min(order.patience_s, order.deadline_s / 2)
        while True:
            now = self._clock()
            self._instance.send_away(begun=now >= patience, late=now >= (patience + deadline) / 2)
            in_use = {what: count for what, count in self._instance.in_use().items() if count}
            if not in_use:
                return
            if now >= deadline:
                left = ", ".join(f"{count} {what}" for what, count in in_use.items())
                raise StageTimeout(f"after {order.deadline_s:g} s there is still something to do ({left})")
            await asyncio.sleep(_TICK_S)
