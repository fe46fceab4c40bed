"""Order an instance to change its role or to leave."""

from __future__ import annotations

import asyncio
import logging

from epd_serve.backends.base import StageCalls
from epd_serve.backends.vllm import VllmInstance
from epd_serve.errors import Conflict, InstanceLost, InvalidRequest, ServeError, StageTimeout
from epd_serve.protocol.instance_state import LeaveOrder, RoleChanged, RoleOrder
from epd_serve.routing.table import InstanceRecord
from epd_serve.types import Role, Stage
from proxy.fleet import Fleet, NoSuchInstance

logger = logging.getLogger(__name__)

_SWITCH = "switch"
#: Beyond its deadline: time to build the new stages, or the old ones again.
_REBUILD_S = 120.0
#: Beyond its deadline: time for the answer.
_LEAVE_S = 10.0


class Switches:
    """Orders role changes and departures; at least one ready instance of P and of D stays."""

    def __init__(self, fleet: Fleet) -> None:
        self._table = fleet.table
        self._calls = fleet.calls
        self._ordered: dict[str, Role] = {}
        self._leaving: set[str] = set()

    def find(self, name: str) -> InstanceRecord:
        record = self._table.get(name)
        if record is None:
            known = ", ".join(one.name for one in self._table) or "none"
            raise NoSuchInstance(f"no instance {name[:100]!r}; known: {known}", param="name")
        return record

    async def order(self, name: str, order: RoleOrder) -> RoleChanged:
        """Return when the instance serves the role; until then it gets no new requests.

        Raises:
            NoSuchInstance, InvalidRequest: the instance or the role is unknown.
            Conflict: it is leaving or switching, or a stage would lose its last instance.
            StageTimeout: it was not empty by the deadline and serves its old role again.
            ServeError: the instance's own error.
        """
        record, calls = self.find(name), self._calls[name]
        try:
            role = Role.parse(order.role)
        except ValueError as error:
            raise InvalidRequest(str(error), param="role") from error
        if role == record.role and name in self._ordered:  # cancels the switch
            return await self._ask(name, calls, order)
        self._check_idle(record)
        # a vLLM process keeps running: it need not be empty if a stage stays
        kept = calls.target.role.stages & role.stages if isinstance(calls, VllmInstance) else frozenset()
        if role != record.role:
            self._check_floor(record, kept)
        self._ordered[name] = role
        if not kept:
            record.drains.add(_SWITCH)
        try:
            return await self._ask(name, calls, order)
        finally:
            del self._ordered[name]
            if self._table.get(name) is record:
                await self._update_record(record, calls)
            record.drains.discard(_SWITCH)

    async def leave(self, name: str, order: LeaveOrder) -> float:
        """Return when the instance is empty and can be stopped; the result is the time taken, in seconds.

        Until then it gets no new requests or orders. If cancelled, it keeps serving.

        Raises:
            NoSuchInstance: the instance is unknown.
            Conflict: it is leaving or switching, or a stage would lose its last instance.
            StageTimeout: it was not empty by the deadline and keeps serving.
        """
        record, calls = self.find(name), self._calls[name]
        self._check_idle(record)
        if record.ready:
            self._check_floor(record)
        self._leaving.add(name)
        record.drains.add(_SWITCH)
        try:
            async with asyncio.timeout(order.deadline_s + _LEAVE_S):
                seconds = (await calls.leave(order)).seconds
            await self._update_record(record, calls)
            return seconds
        except TimeoutError as error:
            raise StageTimeout(f"instance {name} did not report being empty") from error
        finally:
            self._leaving.discard(name)
            record.drains.discard(_SWITCH)

    def _check_idle(self, record: InstanceRecord) -> None:
        name = record.name
        if name in self._ordered:
            raise Conflict(f"instance {name} is switching from {record.role} to {self._ordered[name]}")
        if name in self._leaving:
            raise Conflict(f"instance {name} is leaving")

    async def _ask(self, name: str, calls: StageCalls, order: RoleOrder) -> RoleChanged:
        try:
            async with asyncio.timeout(order.deadline_s + _REBUILD_S):
                return await calls.switch(order)
        except TimeoutError as error:
            raise StageTimeout(f"instance {name} did not report the result of the order") from error

    async def _update_record(self, record: InstanceRecord, calls: StageCalls) -> None:
        """Learn the instance's current role before it gets requests."""
        try:
            info = await calls.info()
            if self._table.get(record.name) is record:
                self._table.update(record.name, info, contains=self._table.num_calls)
        except (InstanceLost, ServeError, ValueError) as error:
            logger.warning("instance %s does not report its role: %s", record.name, error)
            self._table.mark_lost(record.name)

    def _check_floor(self, record: InstanceRecord, kept: frozenset[Stage] = frozenset()) -> None:
        """Raise Conflict if it is the last ready instance of P or D; without E, P encodes."""
        for stage in (Stage.PREFILL, Stage.DECODE):
            ready = self._table.ready(stage)
            if stage not in kept and record in ready and len(ready) == 1:
                raise Conflict(
                    f"instance {record.name} is the only ready one for stage {stage}; start another first, or "
                    "switch another instance to it"
                )
