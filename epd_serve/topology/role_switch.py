"""The change of an instance's role as a state machine: 001 (EPD), section 3.2.4. No clock and no I/O."""

from __future__ import annotations

from enum import StrEnum

from epd_serve.types import Role


class SwitchState(StrEnum):
    """The states of an instance's change of role."""

    SERVING = "SERVING"
    DRAINING = "DRAINING"  # takes nothing new; what is here ends, or goes on elsewhere
    REBUILDING = "REBUILDING"  # is empty; stages and caches of the other role are made


_ALLOWED: dict[SwitchState, frozenset[SwitchState]] = {
    SwitchState.SERVING: frozenset({SwitchState.DRAINING}),
    SwitchState.DRAINING: frozenset({SwitchState.SERVING, SwitchState.REBUILDING}),
    SwitchState.REBUILDING: frozenset({SwitchState.SERVING}),
}


class RoleSwitch:
    """The role of one instance, and the change from one role to the next.

    Attributes:
        role: the role that it serves, or served last.
        wanted: the role that it is to serve; ``role`` while no switch is ordered.
        epoch: number of times its stages were rebuilt; a new epoch makes callers' knowledge of its caches void.
    """

    __slots__ = ("epoch", "role", "state", "wanted")

    def __init__(self, role: Role) -> None:
        self.role = self.wanted = role
        self.state = SwitchState.SERVING
        self.epoch = 0

    @property
    def is_serving(self) -> bool:
        return self.state is SwitchState.SERVING

    def order(self, role: Role) -> None:
        """SERVING → DRAINING."""
        assert role != self.role, f"it has role {role}"
        self._enter(SwitchState.DRAINING)
        self.wanted = role

    def call_back(self) -> None:
        """DRAINING → SERVING, in the old role: nothing has changed."""
        assert self.state is SwitchState.DRAINING, "what is being rebuilt is rebuilt to its end"
        self.wanted = self.role
        self._enter(SwitchState.SERVING)

    def drained(self) -> None:
        """DRAINING → REBUILDING."""
        self._enter(SwitchState.REBUILDING)

    def rebuilt(self, role: Role) -> None:
        """REBUILDING → SERVING, in the role that was wanted or, where that failed, in the old one."""
        assert self.state is SwitchState.REBUILDING and role in (self.role, self.wanted)
        self.role = self.wanted = role
        self.epoch += 1
        self._enter(SwitchState.SERVING)

    def check(self) -> None:
        """Raise AssertionError unless state and roles agree."""
        assert (self.wanted == self.role) == self.is_serving, f"{self.state}: {self.role}, wanted {self.wanted}"

    def _enter(self, state: SwitchState) -> None:
        assert state in _ALLOWED[self.state], f"{self.state} → {state}"
        self.state = state
