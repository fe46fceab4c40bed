"""Carrying a change of the deployment out, step by step, while it serves."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from epd_serve.config import DeploymentConfig, change_config
from epd_serve.launch.config_diff import (
    Difference,
    changed_options,
    check_open_api,
    check_same_deployment,
    difference,
)
from epd_serve.launch.deployment_record import DeploymentRecord, resolved
from epd_serve.launch.processes.process import ProcessDied, ProcessSpec, ProcessState
from epd_serve.launch.processes.supervisor import Supervisor
from epd_serve.rpc.admin import AdminClient, AdminRefused, AdminUnreachable
from epd_serve.topology.change import Step, StepKind
from epd_serve.topology.remembered import remembered_role, role_file

_STARTING = (ProcessState.STARTING, ProcessState.LOADING)
#: So often others may change roles meanwhile, and the rest is planned anew.
_MOST_PLANS = 5
#: How long a gateway that is starting may take to answer what is asked first.
_GATEWAY_S = 30.0
#: Beyond a step's deadline the controller keeps still, so that no other change comes between two steps.
_HOLD_MARGIN_S = 30.0
_RELEASE_S = 2.0
_TAIL_LINES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class ApplyLimits:
    """The time limits of each step of a change.

    Attributes:
        deadline_s: time after which a step has failed; a process that it ends gets its time to end beyond that.
        patience_s: time in which answers may end where they are; then they go on at other instances.
    """

    deadline_s: float = 300.0
    patience_s: float = 1.0


DEFAULT_LIMITS = ApplyLimits()


class ApplyStopped(ValueError):
    """A step failed. The steps before it stay, the deployment serves, and another apply goes on from there."""


class Rollout:
    """Carries out one change of the deployment at a time.

    Args:
        orders: to the gateway.
        before_start: called with each process that will be added.
        told: called with each step and note, besides the function that the caller of ``apply`` gives.
    """

    def __init__(
        self,
        record: DeploymentRecord,
        supervisor: Supervisor,
        orders: GatewayOrders,
        before_start: Callable[[ProcessSpec], Awaitable[None]],
        told: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._record = record
        self._supervisor = supervisor
        self._orders = orders
        self._before_start = before_start
        self._told = told
        self._under_way = ""
        self._task: asyncio.Task[None] | None = None
        self._is_called_off = False
        self._say = told

    @property
    def config(self) -> DeploymentConfig:
        """The deployment that was applied last."""
        return self._record.config

    async def plan(self, config: DeploymentConfig) -> Difference:
        """The change that :meth:`apply` would make. Raises ValueError for a change that is impossible."""
        return (await self._checked(config))[1]

    async def apply(
        self, config: DeploymentConfig, limits: ApplyLimits, tell: Callable[[str], None] = lambda text: None
    ) -> None:
        """Return when the deployment is as ``config`` describes it; ``tell`` is called with each step and note.

        The change goes on to its end even if the caller is cancelled. Raises ValueError for a change that is
        impossible, also while another change is under way, and ApplyStopped where a step failed.
        """
        if self._is_called_off:
            raise ValueError("the deployment is being stopped")
        if self._under_way:
            raise ValueError(f"another apply is under way ({self._under_way}); wait for its end")
        self._under_way = "it is being planned"
        self._task = asyncio.create_task(self._apply(config, limits, tell))
        await asyncio.shield(self._task)

    def call_off(self) -> None:
        """Give up the change under way: the deployment is about to end. :meth:`close` must still be awaited."""
        self._is_called_off = True
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """Return when no change is under way."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    # ------------------------------------------------------------------ before the first step

    async def _checked(self, config: DeploymentConfig) -> tuple[DeploymentConfig, Difference]:
        if not self._supervisor.has_started or any(
            one.num_restarts == 0 and one.state in _STARTING for one in self._supervisor.processes
        ):
            raise ValueError("the deployment is still starting; wait until it is ready")
        old, port = self._record.config, self._record.ports.gateway
        notes = []
        if config.gateway.host != old.gateway.host or config.gateway.port not in (old.gateway.port, port):
            notes.append(f"the gateway stays at {old.gateway.host} port {port} until another start")
        changes: dict[str, Any] = {"gateway": {"host": old.gateway.host, "port": old.gateway.port}}
        if config.engine == "auto":
            changes["engine"] = old.engine
        config = resolved(change_config(config, changes))
        check_same_deployment(old, config)
        notes += check_open_api(old, config)
        found = difference(self._record, config)
        try:
            await self._orders.check(config, Deadline(_GATEWAY_S))
        except OrderRefused as error:
            raise ValueError(f"the gateway does not take the file: {error}") from error
        return config, replace(found, notes=(*notes, *found.notes), options=changed_options(old, config))

    # ------------------------------------------------------------------ the steps

    async def _apply(self, config: DeploymentConfig, limits: ApplyLimits, tell: Callable[[str], None]) -> None:
        def say(text: str) -> None:
            tell(text)
            self._told(text)

        self._say = say
        try:
            config, found = await self._checked(config)
            for line in found.lines():
                say(line)
            try:
                await self._hold(limits.deadline_s + _HOLD_MARGIN_S, Deadline(_GATEWAY_S))
            except OrderRefused as error:
                raise ValueError(f"the gateway takes no orders: {error}") from error
            await self._carry_out(config, found, limits)
        finally:
            self._under_way, self._say = "", self._told

    async def _carry_out(self, config: DeploymentConfig, found: Difference, limits: ApplyLimits) -> None:
        record = self._record
        try:
            while record.look():  # until a moment ago others changed roles, to the settings of before
                found = difference(record, config)
            for name in record.live:  # what they are now, whatever the settings of their roles will be
                self._supervisor.respecify(record.spec(name))
            record.replace_role_settings(config)
            for _ in range(_MOST_PLANS):
                if not found.steps:
                    break
                await self._take_all(found, limits)
                found = difference(record, config)
            if found.steps:
                raise ApplyStopped(
                    f"roles were changed by others meanwhile; after {_MOST_PLANS} plans there is still to do: "
                    f"{', '.join(map(str, found.steps))}\n{self._serves_on()}"
                )
            record.config = config
            await self._orders.take_over(config, Deadline(limits.deadline_s))
        except OrderRefused as error:
            raise ApplyStopped(f"all steps are done; the gateway does not take the new file: {error}") from error
        finally:
            if not self._is_called_off:  # else the gateway is about to end as well
                with suppress(OrderRefused):
                    await self._hold(0.0, Deadline(_RELEASE_S))

    async def _take_all(self, found: Difference, limits: ApplyLimits) -> None:
        steps = found.steps
        for number, step in enumerate(steps):
            self._under_way = f"step {number + 1} of {len(steps)}: {step}"
            self._say(self._under_way)
            deadline = Deadline(limits.deadline_s)
            try:
                await self._hold(limits.deadline_s + _HOLD_MARGIN_S, deadline)
                body = {"deadline_s": deadline.seconds, "patience_s": limits.patience_s}
                if step.kind is StepKind.START:
                    await self._start(step.name, found, deadline)
                elif step.kind is StepKind.SWITCH:
                    await self._switch(step, body, deadline)
                else:
                    await self._stop(step.name, body, deadline)
            except (OrderRefused, ProcessDied, TimeoutError, OSError) as error:
                raise ApplyStopped(self._stopped(steps, number, error)) from error

    async def _hold(self, seconds: float, deadline: Deadline) -> None:
        """Let the controller give no orders for this time."""
        await self._order("/hold", {"seconds": seconds}, deadline)

    async def _start(self, name: str, found: Difference, deadline: Deadline) -> None:
        record, instance = self._record, found.to_start[name]
        record.starts(instance)
        spec = record.spec_of(instance)
        async with asyncio.timeout(deadline.left_s):
            await self._before_start(spec)
        await self._supervisor.add(spec, deadline.left_s)
        record.joined(instance)
        await self._orders.take_over(record.config, deadline)
        await self._orders.is_ready(name, deadline)

    async def _switch(self, step: Step, body: dict[str, Any], deadline: Deadline) -> None:
        record = self._record
        try:
            await self._order(f"/instances/{step.name}/role", body | {"role": str(step.role)}, deadline)
        except OrderRefused:
            role = remembered_role(record.directory, step.name)
            if role is not None:  # its stages may have been made anew, of either role
                record.switched(step.name, role)
                self._supervisor.respecify(record.spec(step.name))
            raise
        record.switched(step.name, step.role)
        self._supervisor.respecify(record.spec(step.name))

    async def _stop(self, name: str, body: dict[str, Any], deadline: Deadline) -> None:
        process = next(one for one in self._supervisor.processes if one.spec.name == name)
        if process.state is ProcessState.READY:
            try:
                await self._order(f"/instances/{name}/leave", body, deadline)
            except OrderRefused:
                if process.state is ProcessState.READY:
                    raise
        self._record.left(name)
        try:
            await self._orders.take_over(
                self._record.config, deadline
            )  # one that is starting reads the file by itself
        finally:
            await self._supervisor.remove(name)
            role_file(self._record.directory, name).unlink(missing_ok=True)

    async def _order(self, path: str, body: dict[str, Any], deadline: Deadline) -> None:
        await self._orders.give("POST", path, body, deadline, lambda reason: self._say(f"waiting: {reason}"))

    def _stopped(self, steps: Sequence[Step], number: int, error: Exception) -> str:
        reason = str(error) or f"it took longer than it may ({type(error).__name__})"
        if isinstance(error, ProcessDied):
            tail = "; ".join(line.strip() for line in error.log_tail[-_TAIL_LINES:])
            reason = f"it died: {error.how} ({tail}); its log is {error.log_file}"
        return f"step {number + 1} of {len(steps)} failed: {steps[number]}: {reason}\n{self._serves_on()}"

    def _serves_on(self) -> str:
        with suppress(ValueError, OSError):
            self._record.look()
        now = ", ".join(f"{name} ({one.options.role})" for name, one in self._record.live.items())
        return f"The deployment serves on with {now}; apply a file again to go on from there"


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
    """Orders to the gateway, which reads the launcher's file.

    Each is repeated until its deadline while the obstacle may pass.

    Args:
        path: socket of the gateway's admin API.
    """

    def __init__(self, path: Path, record: DeploymentRecord) -> None:
        self.client = AdminClient(path)
        self._record = record

    async def check(self, config: DeploymentConfig, deadline: Deadline) -> None:
        """Raise ValueError where the gateway would not serve ``config`` without another start; OrderRefused."""
        body = json.loads(self._record.gateway_config(config))
        if left := (await self.give("POST", "/check", body, deadline))["left"]:
            raise ValueError(
                f"the gateway would need another start for {', '.join(left)}: stop the deployment and start it "
                "from the new file"
            )

    async def take_over(self, config: DeploymentConfig, deadline: Deadline) -> None:
        """Have the gateway serve ``config`` with the present instances. Raises OrderRefused."""
        self._record.write_gateway_file(config)
        await self.give("POST", "/reload", {}, deadline)

    async def give(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        deadline: Deadline,
        waits: Callable[[str], None] = lambda reason: None,
    ) -> Any:
        """Give an order and return the answer. A ``deadline_s`` in the body is cut to the time that is left here.

        ``waits`` is called with each reason that has been in the way for a while. Raises OrderRefused with the
        reason.
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
                waits(reason)
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
