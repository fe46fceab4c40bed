"""Instances that were started elsewhere and join a running gateway for as long as they renew their lease."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from epd_serve.config.elastic import RoleName
from epd_serve.config.gateway import InstanceName, InstanceUrl
from epd_serve.errors import Conflict, InvalidRequest
from epd_serve.rpc.server import Handler, Reply
from proxy.fleet.members import Members, NoSuchInstance

logger = logging.getLogger(__name__)

_TICK_S = 0.2
#: Between two looks: so long, and this process was stopped, and heard none of the renewals.
_STOOD_STILL_S = 0.5


class JoinBody(BaseModel):
    """The body of ``POST /instances``."""

    model_config = ConfigDict(extra="forbid")

    name: InstanceName
    url: InstanceUrl
    lease_s: float = Field(default=10.0, ge=1, le=3600)
    #: Of a vLLM instance that the topology does not name.
    role: RoleName | None = None
    #: Of two with one name the one with the larger number is there; 0: it has none.
    incarnation: int = Field(default=0, ge=0, lt=1 << 63)


@dataclass(slots=True)
class _Lease:
    url: str
    incarnation: int
    term_s: float
    deadline: float


class Leases:
    """The instances that have joined, and until when. Requests of one that leaves run to their end."""

    def __init__(self, members: Members, clock: Callable[[], float] = time.monotonic) -> None:
        self._members = members
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
            if not is_newer and (is_older or self._members.answers(name)):
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
        self._members.join(name, url, role)
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
        self._members.leave(name)

    def _end(self, name: str) -> None:
        """Remove an instance that has not said that it leaves."""
        del self._leases[name]
        self._members.leave(name, said_so=False)

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
        """Until cancelled."""
        while True:
            await asyncio.sleep(_TICK_S)
            self.expire()


class LeaseCalls:
    """Joining and leaving. ``needs_tls``: who joins is called over TLS alone."""

    def __init__(self, leases: Leases, *, needs_tls: bool = False) -> None:
        self._leases = leases
        self._needs_tls = needs_tls

    @property
    def calls(self) -> dict[str, Handler]:
        """The calls over a link of those that have proved the cluster's key."""
        return {"/join": self._join_by_link, "/leave": self._leave_by_link}

    @property
    def router(self) -> APIRouter:
        """``POST /instances`` and ``DELETE /instances/{name}``."""
        router = APIRouter()

        @router.post("/instances")
        async def join(request: Request) -> JSONResponse:
            """Join, or stay for ``lease_s`` from now on; 201 where it is new."""
            body = _read(await request.body())
            is_new = self._join(body)
            answer = {"name": body.name, "lease_s": body.lease_s}
            return JSONResponse(answer, status_code=201 if is_new else 200)

        @router.delete("/instances/{name}")
        async def leave(name: str, incarnation: int = 0) -> JSONResponse:
            """Leave; with ``incarnation`` that one alone, and not another that has the name by now."""
            self._leases.leave(name, incarnation)
            return JSONResponse({"name": name})

        return router

    def _join(self, body: JoinBody) -> bool:
        if self._needs_tls and not body.url.startswith("https://"):
            raise InvalidRequest(
                f"url: {body.url} is plain, and this deployment has tls; start the instance with it, too",
                param="url",
            )
        return self._leases.join(body.name, body.url, body.lease_s, role=body.role, incarnation=body.incarnation)

    async def _join_by_link(self, body: bytes) -> Reply:
        self._join(_read(body))
        return Reply()

    async def _leave_by_link(self, body: bytes) -> Reply:
        told = _read(body)
        self._leases.leave(told.name, told.incarnation)
        return Reply()


def _read(body: bytes) -> JoinBody:
    try:
        return JoinBody.model_validate_json(bytes(body))
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(str(part) for part in fault["loc"]) or "body"
        raise InvalidRequest(
            f'{where}: {fault["msg"]}; write {{"name": "d7", "url": "http://10.0.0.7:8100", "lease_s": 10}}',
            param=where,
        ) from error
