"""Instances that were started elsewhere and join a running gateway for as long as they renew their lease."""

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
#: Between two looks: so long, and this process was stopped, and heard none of the renewals.
_STOOD_STILL_S = 0.5


@dataclass(slots=True)
class _Lease:
    url: str
    incarnation: int
    term_s: float
    deadline: float


class Leases:
    """The instances that have joined, and until when. Requests of one that leaves run to their end."""

    def __init__(self, fleet: Fleet, clock: Callable[[], float] = time.monotonic) -> None:
        self._fleet = fleet
        self._clock = clock
        self._leases: dict[str, _Lease] = {}
        self._looked_at = clock()

    def join(
        self,
        name: str,
        url: str,
        lease_s: float,
        *,
        role: str | None = None,
        incarnation: int = 0,
    ) -> bool:
        """Add an instance, or renew its lease; return whether it is new.

        It replaces one of its name that is older by its incarnation or does not answer any more. Raises Conflict
        for a name that the deployment has, or that another instance has joined under.
        """
        lease = self._leases.get(name)
        if lease is not None and lease.url != url:
            numbered = bool(incarnation and lease.incarnation)
            is_newer = numbered and incarnation > lease.incarnation
            is_older = numbered and not is_newer
            if not is_newer and (is_older or self._fleet.table[name].ready):
                raise Conflict(
                    f"an instance {name} at {lease.url} has joined; take another name, or wait for its end"
                )
            logger.warning("instance %s at %s takes the place of the one at %s", name, url, lease.url)
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
        """Remove an instance; ``incarnation``: 0 for any. Raises NoSuchInstance for one that has not joined."""
        lease = self._leases.get(name)
        if lease is not None and incarnation not in (0, lease.incarnation):
            raise NoSuchInstance(f"the instance {name} that has joined is another one", param="name")
        if self._leases.pop(name, None) is None:
            joined = ", ".join(self._leases) or "none"
            raise NoSuchInstance(f"no instance {name[:100]!r} has joined; there are: {joined}", param="name")
        self._fleet.leave(name)

    def _end(self, name: str) -> None:
        """Remove an instance that has not said that it leaves."""
        del self._leases[name]
        self._fleet.leave(name, said_so=False)

    def expire(self) -> None:
        """Remove the instances whose lease is over; to be called each ``_TICK_S``."""
        before, now = self._looked_at, self._clock()
        self._looked_at = now
        if now - before > _STOOD_STILL_S:
            for lease in self._leases.values():
                lease.deadline = now + lease.term_s
        for name in [name for name, lease in self._leases.items() if lease.deadline <= now]:
            logger.warning("instance %s has not renewed its lease", name)
            self._end(name)

    async def run(self) -> None:
        """End leases until cancelled."""
        while True:
            await asyncio.sleep(_TICK_S)
            self.expire()
