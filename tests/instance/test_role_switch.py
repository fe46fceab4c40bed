"""Whatever is ordered and however it ends, an instance has one role and comes back to serve it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epd_serve.instance.lifecycle import RoleSwitch, SwitchState
from epd_serve.types import Role, Stage

ROLES = st.sets(st.sampled_from(list(Stage)), min_size=1).map(Role.of)


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.switch = RoleSwitch(Role.parse("P"))
        self.served = self.switch.role
        self.num_rebuilt = 0

    @precondition(lambda self: self.switch.is_serving)
    @rule(role=ROLES)
    def order(self, role: Role) -> None:
        if role != self.switch.role:
            self.switch.order(role)
            assert self.switch.wanted == role

    @precondition(lambda self: self.switch.state is SwitchState.DRAINING)
    @rule()
    def call_back(self) -> None:
        self.switch.call_back()

    @precondition(lambda self: self.switch.state is SwitchState.DRAINING)
    @rule()
    def drained(self) -> None:
        self.switch.drained()

    @precondition(lambda self: self.switch.state is SwitchState.REBUILDING)
    @rule(fails=st.booleans())
    def rebuilt(self, fails: bool) -> None:
        self.served = self.served if fails else self.switch.wanted
        self.num_rebuilt += 1
        self.switch.rebuilt(self.served)

    @invariant()
    def one_role(self) -> None:
        self.switch.check()
        assert self.switch.role == self.served
        assert self.switch.epoch == self.num_rebuilt, "callers must learn of new caches, and of nothing else"


TestRoleSwitch = Machine.TestCase


@given(role=ROLES)
def test_what_the_table_does_not_allow_is_a_fault(role: Role) -> None:
    switch = RoleSwitch(Role.parse("P"))
    for step in (switch.call_back, switch.drained, lambda: switch.rebuilt(role)):
        with pytest.raises(AssertionError):
            step()
    switch.order(Role.parse("D"))
    switch.drained()
    with pytest.raises(AssertionError):
        switch.call_back()
