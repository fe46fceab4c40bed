"""Role switches of simulated instances, by orders of the real controller: drain, rebuild, serve (EPD, 3.2.4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from epd_serve.autoscale.controller import Controller, Decision, Order
from epd_serve.autoscale.instance_load import instance_loads
from epd_serve.sim.device import Clock
from epd_serve.sim.gateway import SimGateway
from epd_serve.sim.instance import SimInstance
from epd_serve.sim.spec import SimInstanceSpec, with_memory
from epd_serve.types import Role


@dataclass(slots=True)
class RoleSpan:
    """An instance in one state: "SERVING" or "DRAINING" in ``role``, or "REBUILDING" to it.

    ``until_s`` is None while it lasts.
    """

    instance: str
    role: Role
    state: str
    from_s: float
    until_s: float | None = None


def rebuild_s(old: Role, new: Role) -> float:
    """Return the most that EPD's authors give: less between roles with the language model than with the tower."""
    return 0.3 if old.has_language_model and new.has_language_model and old.encodes == new.encodes else 0.7


class Switching:
    """Looks at the gateway's table each ``interval_s`` and carries out what the controller orders.

    An instance that drains takes nothing new and finishes what it has, decodes included; no work is moved.

    Args:
        rebuild_s: seconds between two roles, drained.
        num_blocks: of language models; None: what the memory of the instance's device has room for.

    Attributes:
        spans: each instance's states, as they came.
        decisions: those that ordered something, and the first of each row of equal ones.
    """

    def __init__(
        self,
        controller: Controller,
        *,
        interval_s: float = 1.0,
        rebuild_s: Callable[[Role, Role], float] = rebuild_s,
        num_blocks: int | None = None,
    ) -> None:
        self._controller = controller
        self._interval_s = interval_s
        self._rebuild_s = rebuild_s
        self._num_blocks = num_blocks
        self.spans: list[RoleSpan] = []
        self.decisions: list[Decision] = []
        self._next_s = 0.0
        self._draining: Order | None = None

    def begin(
        self,
        clock: Clock,
        gateway: SimGateway,
        instances: dict[str, SimInstance],
        start: Callable[[SimInstanceSpec, int], None],
    ) -> None:
        """``start`` puts an instance, with its process's number, in the place of the one of its name."""
        self._clock, self._gateway, self._instances, self._start = clock, gateway, instances, start
        self.spans = [RoleSpan(name, one.spec.role, "SERVING", clock.now) for name, one in instances.items()]

    def tick(self) -> None:
        """Called behind each round of reports."""
        if self._draining is not None and self._is_drained(self._draining.instance):
            self._rebuild(self._draining)
        now = self._clock.now
        if now < self._next_s:
            return
        self._next_s = now + self._interval_s
        decision = self._controller.decide(now, instance_loads(self._gateway.table))
        if decision.order is not None or not self.decisions or self.decisions[-1].kind is not decision.kind:
            self.decisions.append(decision)
        if decision.order is not None and self._draining is None:
            self._drain(decision.order)

    def _drain(self, order: Order) -> None:
        self._draining = order
        self._gateway.table[order.instance].drains.add("switch")
        self._enter(order.instance, self._instances[order.instance].spec.role, "DRAINING")

    def _is_drained(self, name: str) -> bool:
        instance, record = self._instances[name], self._gateway.table[name]
        is_busy = instance.tower.is_busy or (instance.language is not None and instance.language.is_busy)
        return not is_busy and not any(record.in_flight.values())

    def _rebuild(self, order: Order) -> None:
        self._draining = None
        old = self._instances[order.instance]
        old.ready = False
        self._gateway.table.mark_lost(order.instance)
        self._enter(order.instance, order.role, "REBUILDING")
        self._clock.after(self._rebuild_s(old.spec.role, order.role), lambda: self._serve(order, old))

    def _serve(self, order: Order, old: SimInstance) -> None:
        spec = replace(old.spec, role=order.role)
        spec = (
            with_memory(spec, share=1.0)
            if self._num_blocks is None
            else replace(spec, num_blocks=self._num_blocks)
        )
        self._start(spec, old.pid + 1)
        record = self._gateway.table[order.instance]
        self._gateway.table.update(order.instance, self._instances[order.instance].info(), contains=0)
        record.drains.clear()
        self._enter(order.instance, order.role, "SERVING")

    def _enter(self, name: str, role: Role, state: str) -> None:
        last = next(span for span in reversed(self.spans) if span.instance == name)
        last.until_s = self._clock.now
        self.spans.append(RoleSpan(name, role, state, self._clock.now))
