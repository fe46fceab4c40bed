"""Changes of a running deployment: where they end, what serves on the way, and how few starts they take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.topology.change import ChangeImpossible, Part, StepKind, plan_change
from epd_serve.types import Role

ROLES = ("E", "P", "D", "EP", "ED", "PD", "EPD")
roles = st.sampled_from(ROLES)


def part(name: str, role: str, kind: object = "cpu", **more: object) -> Part:
    return Part(name=name, role=Role.parse(role), kind=kind, **more)  # type: ignore[arg-type]


def serves(roles: Iterable[str]) -> bool:
    return {"P", "D"} <= set("".join(roles))


@st.composite
def fleets(draw: st.DrawFn, prefix: str, kinds: Sequence[str] = ("cpu",), most: int = 5) -> list[Part]:
    """Instances that serve together."""
    drawn = draw(
        st.lists(st.tuples(roles, st.sampled_from(kinds)), min_size=1, max_size=most).filter(
            lambda found: serves(role for role, _ in found)
        )
    )
    return [part(f"{prefix}{number}", role, kind) for number, (role, kind) in enumerate(drawn)]


def carry_out(running: Sequence[Part], wanted: Sequence[Part]) -> dict[str, Part]:
    """The instances that run in the end; P and D must have an instance at each moment."""
    change = plan_change(running, wanted)
    named = dict(zip(change.names, wanted, strict=True))
    assert len(named) == len(wanted)
    now = {one.name: one for one in running}
    for step in change.steps:
        if step.kind is StepKind.START:
            assert step.name not in now
            now[step.name] = replace(named[step.name], name=step.name)
            continue
        before = now.pop(step.name)
        assert serves(str(one.role) for one in now.values()), f"{step}: nobody serves a stage"
        assert step.old == before.role
        if step.kind is StepKind.SWITCH:
            now[step.name] = replace(before, role=step.role)
    assert [one.kind for one in change.steps] == sorted(one.kind for one in change.steps)
    assert {name: (one.role, one.kind) for name, one in now.items()} == {
        name: (one.role, one.kind) for name, one in named.items()
    }
    return now


@given(running=fleets("r", ("cpu", "other")), wanted=fleets("w", ("cpu", "other")))
def test_it_ends_in_what_is_wanted_and_every_stage_serves_all_the_time(
    running: list[Part], wanted: list[Part]
) -> None:
    carry_out(running, wanted)
    assert plan_change(wanted, wanted).steps == ()


@given(running=fleets("r"), wanted=fleets("w"))
def test_on_devices_it_is_the_same_or_is_refused(running: list[Part], wanted: list[Part]) -> None:
    on = [replace(one, kind=f"cuda:{i}", devices=(f"cuda:{i}",)) for i, one in enumerate(running)]
    to = [replace(one, kind=f"cuda:{i}", devices=(f"cuda:{i}",)) for i, one in enumerate(wanted)]
    try:
        carry_out(on, to)
    except ChangeImpossible as error:
        assert "list another device" in str(error)


def test_a_device_that_is_not_free_is_named_before_anything_changes() -> None:
    running = [part("pd0", "PD", "old", devices=("cuda:0",))]
    with pytest.raises(ChangeImpossible, match="cuda:0 lacks room for pd0"):
        plan_change(running, [part("pd0", "PD", "new", devices=("cuda:0",))])


def test_an_instance_stays_within_the_roles_that_it_can_have() -> None:
    running = [part("p0", "P", roles=frozenset({Role.parse("P"), Role.parse("D")})), part("pd0", "PD")]
    wanted = [part("e0", "E"), part("pd0", "PD")]
    assert [str(step) for step in plan_change(running, wanted).steps] == ["start e0 (E)", "stop p0 (P)"]
