"""Leases of instances that join a running gateway and renew their membership."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from epd_serve.errors import Conflict
from proxy.fleet import Fleet, NoSuchInstance

logger = logging.getLogger(__name__)

_TICK_S = 0.2
#: After such a gap between two checks this process was stopped and missed renewals.
_STOPPED_S = 0.5


@dataclass(slots=True)
class _Lease:
    url: str
    incarnation: int
    term_s: float
    deadline: float


class Leases:
    """The instances that have joined, with their deadlines. Requests of a leaving instance finish."""

    def __init__(self, fleet: Fleet, clock: Callable[[], float] = time.monotonic) -> None:
        self._fleet = fleet
        self._clock = clock
        self._leases: dict[str, _Lease] = {}
        self._checked_at = clock()

    def join(
        self,
        name: str,
        url: str,
        lease_s: float,
        *,
        role: str | None = None,
        incarnation: int = 0,
    ) -> bool:
        """Add an instance or renew its lease; return whether it is new.

        It replaces an instance of its name with an older incarnation or without answers. Raises Conflict for a
        name of the deployment or of another joined instance.
        """
        lease = self._leases.get(name)
        if lease is not None and lease.url != url:
            numbered = bool(incarnation and lease.incarnation)
            is_newer = numbered and incarnation > lease.incarnation
            is_older = numbered and not is_newer
            if not is_newer and (is_older or self._fleet.table[name].ready):
                raise Conflict(
                    f"an instance {name} at {lease.url} has joined; choose another name or wait until it leaves"
                )
            logger.warning("instance %s at %s replaces the one at %s", name, url, lease.url)
            self._end(name)
            lease = None
        deadline = self._clock() + lease_s
        if lease is not None:
            lease.term_s, lease.deadline, lease.incarnation = lease_s, deadline, incarnation
            return False
        self._fleet.join(name, url, role)
        self._leases[name] = _Lease(url, incarnation, lease_s, deadline)
        return True

    def leave(self, name: str, incarnation: int = 0) -> None:
        """Remove an instance; ``incarnation`` 0 matches any. Raises NoSuchInstance."""
        lease = self._leases.get(name)
        if lease is not None and incarnation not in (0, lease.incarnation):
            raise NoSuchInstance(f"another incarnation of instance {name} has joined", param="name")
        if self._leases.pop(name, None) is None:
            joined = ", ".join(self._leases) or "none"
            raise NoSuchInstance(f"no instance {name[:100]!r} has joined; joined: {joined}", param="name")
        self._fleet.leave(name)

    def _end(self, name: str) -> None:
        del self._leases[name]
        self._fleet.leave(name, finishes_requests=False)

    def expire(self) -> None:
        """Remove instances with expired leases; call every ``_TICK_S``."""
        before, now = self._checked_at, self._clock()
        self._checked_at = now
        if now - before > _STOPPED_S:
            for lease in self._leases.values():
                lease.deadline = now + lease.term_s
        for name in [name for name, lease in self._leases.items() if lease.deadline <= now]:
            logger.warning("instance %s has not renewed its lease", name)
            self._end(name)

    async def run(self) -> None:
        """Expire leases until cancelled."""
        while True:
            await asyncio.sleep(_TICK_S)
            self.expire()
