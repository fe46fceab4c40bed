"""Orders for an instance: to have another role, to leave."""

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
#: Beyond its deadline, for an instance that makes its new stages, or its old ones again.
_REBUILD_S = 120.0
#: Beyond its deadline, for the answer of an instance that has just become empty.
_LEAVE_S = 10.0


class Switches:
    """Has instances change their roles or leave; one that is ready is left for each stage that requests need."""

    def __init__(self, fleet: Fleet) -> None:
        self._table = fleet.table
        self._calls = fleet.calls
        self._ordered: dict[str, Role] = {}
        self._leaving: set[str] = set()

    def find(self, name: str) -> InstanceRecord:
        """Raises NoSuchInstance."""
        record = self._table.get(name)
        if record is None:
            known = ", ".join(one.name for one in self._table) or "none"
            raise NoSuchInstance(f"there is no instance {name[:100]!r}; there are: {known}", param="name")
        return record

    async def order(self, name: str, order: RoleOrder) -> RoleChanged:
        """Return when the instance serves the role; until then it gets nothing new.

        Raises:
            NoSuchInstance, InvalidRequest: there is none, or it cannot have that role.
            Conflict: it is leaving or on its way to another role, or a stage would be left without an instance.
            StageTimeout: it was not empty by the deadline; it serves its old role again.
            ServeError: as it answers.
        """
        record, calls = self.find(name), self._calls[name]
        try:
            role = Role.parse(order.role)
        except ValueError as error:
            raise InvalidRequest(str(error), param="role") from error
        if role == record.role and name in self._ordered:  # it is called back
            return await self._ask(name, calls, order)
        self._check_idle(record)
        # a process of vLLM goes on as it is: where a stage stays, it need not be empty
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
                await self._look(record, calls)
            record.drains.discard(_SWITCH)

    async def leave(self, name: str, order: LeaveOrder) -> float:
        """Return when nothing is left of what it had, with the seconds that it took, so that it can be ended.

        Meanwhile it gets nothing new and no other order; afterwards, what it says it can take. Cancelled before,
        it serves on.

        Raises:
            NoSuchInstance: there is none.
            Conflict: it is leaving or on its way to another role, or a stage would be left without an instance.
            StageTimeout: it was not empty by the deadline; it serves on.
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
            await self._look(record, calls)
            return seconds
        except TimeoutError as error:
            raise StageTimeout(f"instance {name} did not say whether it is empty") from error
        finally:
            self._leaving.discard(name)
            record.drains.discard(_SWITCH)

    def _check_idle(self, record: InstanceRecord) -> None:
        name = record.name
        if name in self._ordered:
            raise Conflict(f"instance {name} is on its way from {record.role} to {self._ordered[name]}")
        if name in self._leaving:
            raise Conflict(f"instance {name} is leaving")

    async def _ask(self, name: str, calls: StageCalls, order: RoleOrder) -> RoleChanged:
        try:
            async with asyncio.timeout(order.deadline_s + _REBUILD_S):
                return await calls.switch(order)
        except TimeoutError as error:
            raise StageTimeout(f"instance {name} did not say what became of the order") from error

    async def _look(self, record: InstanceRecord, calls: StageCalls) -> None:
        """Its role as it is now, before it gets anything to do."""
        try:
            info = await calls.info()
            if self._table.get(record.name) is record:
                self._table.update(record.name, info, contains=self._table.num_calls)
        except (InstanceLost, ServeError, ValueError) as error:
            logger.warning("instance %s does not say which role it has: %s", record.name, error)
            self._table.mark_lost(record.name)

    def _check_floor(self, record: InstanceRecord, kept: frozenset[Stage] = frozenset()) -> None:
        """Raise Conflict where it is the last that takes requests for a stage that it does not keep.

        E is no must: P encodes then.
        """
        for stage in (Stage.PREFILL, Stage.DECODE):
            ready = self._table.ready(stage)
            if stage not in kept and record in ready and len(ready) == 1:
                raise Conflict(
                    f"instance {record.name} is the only one that is ready for stage {stage}; start another "
                    "first, or have one of another stage take its place"
                )
