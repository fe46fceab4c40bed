"""Role switches of simulated instances, by orders of the real controller: drain, rebuild, serve (EPD, 3.2.4)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from epd_serve.autoscale.controller import Controller, Decision, Order
from epd_serve.autoscale.instance_load import instance_loads
from epd_serve.sim.instance import SimInstance
from epd_serve.sim.simulator import Simulation
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
        num_blocks: of language models.

    Attributes:
        spans: each instance's states, as they came.
        decisions: those that ordered something, and the first of each row of equal ones.
    """

    def __init__(
        self,
        controller: Controller,
        *,
        interval_s: float = 1.0,
        num_blocks: int,
    ) -> None:
        self._controller = controller
        self._interval_s = interval_s
        self._num_blocks = num_blocks
        self.spans: list[RoleSpan] = []
        self.decisions: list[Decision] = []
        self._next_s = 0.0
        self._draining: Order | None = None

    def tick(self, simulation: Simulation) -> None:
        """Finish a switch whose instance is drained; order the next one when the controller says so."""
        now_s = simulation.clock.now
        if not self.spans:
            self.spans = [
                RoleSpan(name, one.spec.role, "SERVING", now_s) for name, one in simulation.instances.items()
            ]
        if self._draining is not None:
            self._rebuild(self._draining, simulation)
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._interval_s
        decision = self._controller.decide(now_s, instance_loads(simulation.table))
        order = decision.order
        if order is not None or not self.decisions or self.decisions[-1].kind is not decision.kind:
            self.decisions.append(decision)
        if order is not None and self._draining is None:
            self._draining = order
            simulation.table[order.instance].drains.add("switch")
            self._enter(order.instance, simulation.instances[order.instance].spec.role, "DRAINING", now_s)

    def _rebuild(self, order: Order, simulation: Simulation) -> None:
        """Rebuild an instance, unless it has work."""
        old = simulation.instances[order.instance]
        if old.is_encoding or old.is_stepping or any(simulation.table[order.instance].in_flight.values()):
            return
        self._draining = None
        old.ready = False
        simulation.table.mark_lost(order.instance)
        self._enter(order.instance, order.role, "REBUILDING", simulation.clock.now)
        simulation.clock.after(rebuild_s(old.spec.role, order.role), lambda: self._serve(order, old, simulation))

    def _serve(self, order: Order, old: SimInstance, simulation: Simulation) -> None:
        spec = replace(old.spec, role=order.role, num_blocks=self._num_blocks)
        simulation.start_instance(spec, old.pid + 1)
        simulation.table.update(order.instance, simulation.instances[order.instance].info(), contains=0)
        simulation.table[order.instance].drains.clear()
        self._enter(order.instance, order.role, "SERVING", simulation.clock.now)

    def _enter(self, name: str, role: Role, state: str, now_s: float) -> None:
        last = next(span for span in reversed(self.spans) if span.instance == name)
        last.until_s = now_s
        self.spans.append(RoleSpan(name, role, state, now_s))
