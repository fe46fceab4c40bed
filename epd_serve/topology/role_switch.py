"""How an instance comes to another role: 001 (EPD), section 3.2.4. No clock and no I/O."""

from __future__ import annotations

from enum import StrEnum

from epd_serve.types import Role


class SwitchState(StrEnum):
    """What an instance does about its role."""

    SERVING = "SERVING"
    DRAINING = "DRAINING"  # takes nothing new; what is here ends, or goes on elsewhere
    REBUILDING = "REBUILDING"  # is empty; stages and caches of the other role are made


_ALLOWED: dict[SwitchState, frozenset[SwitchState]] = {
    SwitchState.SERVING: frozenset({SwitchState.DRAINING}),
    SwitchState.DRAINING: frozenset({SwitchState.SERVING, SwitchState.REBUILDING}),
    SwitchState.REBUILDING: frozenset({SwitchState.SERVING}),
}


class RoleSwitch:
    """The role of one instance, and the way from one to the next.

    Attributes:
        role: what it serves, or served last.
        wanted: what it is to serve; ``role`` while nothing is ordered.
        epoch: how often its stages were made anew; with it, what callers know of its caches is out of date.
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
