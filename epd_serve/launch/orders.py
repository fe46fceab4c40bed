"""Orders to the gateway of a deployment, over its admin API: each is repeated while its obstacle may pass."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from epd_serve.rpc.admin import AdminClient, AdminRefused, AdminUnreachable

_AGAIN_S = 0.1
#: A reason that stays for so long is worth a word.
_LONG_S = 2.0
#: An order's own deadline is this part of the time that is left, and at most so many seconds, before its end: its
#: answer comes while somebody waits for it.
_MARGIN, _MAX_MARGIN_S = 0.1, 2.0
#: Somebody is starting again, or is on the way to something else.
_PASSING = frozenset({409, 429, 502, 503})


class OrderRefused(Exception):
    """The gateway, or the instance, refused an order for good, or until the deadline."""


class Deadline:
    """One deadline for several calls.

    Attributes:
        seconds: time from its making until the deadline.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._clock = asyncio.get_running_loop().time
        self._at_s = self._clock() + seconds

    @property
    def left_s(self) -> float:
        return max(0.0, self._at_s - self._clock())


class GatewayOrders:
    """Orders to the gateway; each is repeated until its deadline while the obstacle may pass.

    Args:
        waits: called with each reason that has been in the way for a while.
    """

    def __init__(self, path: Path, waits: Callable[[str], None] = lambda reason: None) -> None:
        self.client = AdminClient(path)
        self._waits = waits

    async def give(self, method: str, path: str, body: dict[str, Any] | None, deadline: Deadline) -> Any:
        """Give an order and return the answer. A ``deadline_s`` in the body is cut to the time that is left here.

        Raises OrderRefused with the reason.
        """
        reason = "the gateway does not answer" if deadline.left_s else "no time is left to ask the gateway"
        to_tell: dict[str, float] = {}
        while (left_s := deadline.left_s) > 0:
            try:
                return await self.client.ask(method, path, _within(body, left_s), left_s)
            except TimeoutError:
                break
            except AdminUnreachable as error:  # it is starting again
                reason = f"the gateway does not answer: {error}"
            except AdminRefused as refusal:
                reason = str(refusal)
                if refusal.status not in _PASSING:
                    raise OrderRefused(reason) from refusal
            if left_s < to_tell.setdefault(reason, left_s - _LONG_S):
                self._waits(reason)
                to_tell[reason] = -math.inf
            await asyncio.sleep(_AGAIN_S)
        raise OrderRefused(f"{reason}; {deadline.seconds:g} s are over")

    async def is_ready(self, name: str, deadline: Deadline) -> None:
        """Return when the gateway gives an instance work. Raises OrderRefused."""
        while deadline.left_s:
            with suppress(OrderRefused):
                if name in (await self.give("GET", "/ready", None, deadline))["ready"]:
                    return
            await asyncio.sleep(_AGAIN_S)
        raise OrderRefused(f"the gateway has not found {name} ready in {deadline.seconds:g} s")


def _within(body: dict[str, Any] | None, left_s: float) -> dict[str, Any] | None:
    if body is None or "deadline_s" not in body:
        return body
    return body | {"deadline_s": min(body["deadline_s"], left_s - min(_MAX_MARGIN_S, _MARGIN * left_s))}
