"""Changes of a running deployment: where they end, what serves on the way, and how few starts they take."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd_serve.topology import parse_topology, place
from epd_serve.topology.change import ChangeImpossible, Part, Step, StepKind, plan_change
from epd_serve.types import Role

ROLES = ("E", "P", "D", "EP", "ED", "PD", "EPD")
roles = st.sampled_from(ROLES)


def part(name: str, role: str, kind: object = "cpu", **more: object) -> Part:
    return Part(name=name, role=Role.parse(role), kind=kind, **more)  # type: ignore[arg-type]


def serves(roles: Iterable[str]) -> bool:
    return {"P", "D"} <= set("".join(roles))


@st.composite
def fleets(draw: st.DrawFn, prefix: str, kinds: Sequence[str] = ("cpu",), most: int = 5) -> list[Part]:
    """Instances that serve together; those that run may have settings of before."""
    drawn = draw(
        st.lists(st.tuples(roles, st.sampled_from(kinds), st.booleans()), min_size=1, max_size=most).filter(
            lambda found: serves(role for role, _, _ in found)
        )
    )
    return [
        part(f"{prefix}{number}", role, kind, is_current=prefix == "w" or fresh)
        for number, (role, kind, fresh) in enumerate(drawn)
    ]


def carry_out(running: Sequence[Part], wanted: Sequence[Part], steps: Sequence[Step]) -> list[Part]:
    """The instances that run in the end; a stage that had an instance must have one at each moment."""
    named = {one.name: one for one in wanted}
    now = {one.name: one for one in running}
    needed = set("PD") & set("".join(str(one.role) for one in running))
    for step in steps:
        if step.kind is StepKind.START:
            assert step.name not in now
            now[step.name] = named[step.name]
            continue
        before = now.pop(step.name)
        assert needed <= set("".join(str(one.role) for one in now.values())), f"{step}: nobody serves a stage"
        assert step.old == before.role
        if step.kind is StepKind.SWITCH:
            assert step.role != before.role
            now[step.name] = part(step.name, str(step.role), before.kind, devices=before.devices)
    return list(now.values())


def as_counter(parts: Iterable[Part]) -> Counter[object]:
    return Counter((one.kind, str(one.role), one.is_current) for one in parts)


@given(fleets("r", ("cpu", "beside")), fleets("w", ("cpu", "beside")))
@settings(max_examples=150)
def test_it_ends_in_what_is_wanted_and_every_stage_serves_all_the_time(
    running: list[Part], wanted: list[Part]
) -> None:
    steps = plan_change(running, wanted)
    assert as_counter(carry_out(running, wanted, steps)) == as_counter(wanted)
    assert all(a.kind <= b.kind for a, b in pairwise(steps)), "starts, then switches, then stops"
    assert len({step.name for step in steps if step.kind is not StepKind.SWITCH}) == sum(
        step.kind is not StepKind.SWITCH for step in steps
    ), "nothing is started or stopped twice"


@st.composite
def on_devices(draw: st.DrawFn, prefix: str) -> list[Part]:
    """On two devices and the CPU; a process on a device may have to be another one."""
    drawn = draw(
        st.lists(st.tuples(roles, st.sampled_from("ab"), st.booleans()), min_size=2, max_size=3).filter(
            lambda found: serves(role for role, _, _ in found)
        )
    )
    return [
        part(f"{prefix}{place}", role, f"{kind} {place}", devices=(place,), is_current=prefix == "w" or fresh)
        for place, (role, kind, fresh) in zip(("cuda:0", "cuda:1", "cpu"), drawn, strict=False)
    ]


@given(on_devices("r"), on_devices("w"))
@settings(max_examples=150)
def test_on_devices_it_is_the_same_or_is_refused_with_what_is_possible(
    running: list[Part], wanted: list[Part]
) -> None:
    try:
        steps = plan_change(running, wanted)
    except ChangeImpossible as refusal:
        assert "stop the deployment and start it from the new file" in str(refusal)
    else:
        assert as_counter(carry_out(running, wanted, steps)) == as_counter(wanted)
        assert all(a.kind <= b.kind for a, b in pairwise(steps))


def placed(line: str, devices: Sequence[str], prefix: str) -> list[Part]:
    return [
        part(f"{prefix}{one.name}", str(one.role), one.devices, devices=one.devices)
        for one in place(parse_topology(line), devices)
    ]


def said(running: list[Part], wanted: list[Part]) -> list[str]:
    return [str(step) for step in plan_change(running, wanted)]


def test_what_can_change_its_role_does() -> None:
    cpu = ["cpu"]
    assert said(placed("E-P-D", cpu, ""), placed("E-P-D", cpu, "w")) == []
    assert said(placed("2E-P-D", cpu, ""), placed("E-P-2D", cpu, "w")) == ["switch e1 from E to D"]
    assert said(placed("EPD", cpu, ""), placed("E-P-D", cpu, "w")) == [
        "start wp0 (P)",
        "start wd0 (D)",
        "switch epd0 from EPD to E",
    ]
    assert said(placed("E-P-D", cpu, ""), placed("EP-D", cpu, "w")) == ["switch e0 from E to EP", "stop p0 (P)"]
    alone = said([part("epd0", "EPD")], [part("ep0", "EP"), part("d0", "D")])
    assert alone == ["start ep0 (EP)", "start d0 (D)", "stop epd0 (EPD)"], "nobody can take its place meanwhile"
    swap = said(placed("EP-D", cpu, ""), placed("ED-P", cpu, "w"))
    assert [step.split()[0] for step in swap] == ["start", "switch", "stop"], "P and D are both the only ones"


def kinds(steps: Sequence[Step]) -> Counter[StepKind]:
    return Counter(step.kind for step in steps)


def test_one_instance_serves_all_stages_while_others_change_places() -> None:
    devices = ["cuda:0", "cuda:1", "cuda:2"]
    assert said(placed("E-P-D", devices, ""), placed("E-D-P", devices, "w")) == [
        "switch e0 from E to EPD",
        "switch p0 from P to D",
        "switch d0 from D to P",
        "switch e0 from EPD to E",
    ]


def test_a_device_that_is_not_free_is_named_before_anything_changes() -> None:
    """An instance of another kind, as with another share: its process must end first."""
    running = placed("E-PD-PD", ["cuda:0", "cuda:1", "cuda:2"], "")
    wanted = [*running[:2], part("new", "PD", "other", devices=("cuda:2",))]
    with pytest.raises(ChangeImpossible, match=r"cuda:2 has no room for new \(PD\) beside pd1 \(PD\), which"):
        plan_change(running, wanted)
    assert said(running, running[:2]) == ["stop pd1 (PD)"], "the file to apply before it"
    assert said(running[:2], wanted) == ["start new (PD)"]
    with pytest.raises(ChangeImpossible, match=r"epd0 .*list another device, or stop the deployment and start it"):
        plan_change(placed("EPD", ["cuda:0"], ""), [part("new", "EPD", "other", devices=("cuda:0",))])


def test_roles_that_nobody_else_has_are_kept_where_there_is_no_room() -> None:
    two = ["cuda:0", "cuda:1"]
    with pytest.raises(ChangeImpossible, match=r"ep0 \(EP\), d0 \(D\) cannot become ED, P while"):
        plan_change(placed("EP-D", two, ""), placed("ED-P", two, "w"))


def test_new_settings_come_by_a_switch_or_with_another_process() -> None:
    stale = [part("e0", "E"), part("pd0", "PD"), part("pd1", "PD", is_current=False)]
    wanted = [part("we", "E"), part("w0", "PD"), part("w1", "PD")]
    assert said(stale, wanted) == ["switch pd1 from PD to EPD", "switch pd1 from EPD to PD"]
    alone = plan_change([part("epd0", "EPD", is_current=False)], [part("w0", "EPD")])
    assert [str(step) for step in alone] == ["start w0 (EPD)", "stop epd0 (EPD)"]


def test_a_tensor_parallel_instance_stays_a_language_model() -> None:
    wide = ("cuda:0", "cuda:1")
    other = part("pd1", "PD", "a", devices=("cuda:2",))
    running = [part("pd0", "PD", wide, devices=wide), other]
    assert said(running, [part("w0", "P", wide, devices=wide), other]) == ["switch pd0 from PD to P"]
    with pytest.raises(ChangeImpossible):
        plan_change(running, [part("w0", "E", wide, devices=wide), other])


@pytest.mark.parametrize(
    ("before", "after", "switches"),
    [("4E-8P-20D", "8E-12P-12D", 12), ("2E-14P-16D", "16D-14P-2E", 32), ("E-P-30D", "E-P-30D", 0)],
)
def test_large_deployments(before: str, after: str, switches: int) -> None:
    devices = [f"cuda:{number}" for number in range(32)]
    running, wanted = placed(before, devices, ""), placed(after, devices, "w")
    steps = plan_change(running, wanted)
    assert as_counter(carry_out(running, wanted, steps)) == as_counter(wanted)
    assert kinds(steps) == Counter({StepKind.SWITCH: switches} if switches else {})


def test_the_settings_of_a_large_deployment() -> None:
    devices = [f"cuda:{number}" for number in range(32)]
    wanted = placed("E-P-30D", devices, "")
    running = [replace(one, is_current=False) for one in wanted]
    steps = plan_change(running, wanted)
    assert as_counter(carry_out(running, wanted, steps)) == as_counter(wanted)
    assert kinds(steps)[StepKind.SWITCH] == len(steps) == 2 * 32 + 2, "a pair for the only P's stand-in"


def test_many_processes_on_a_cpu() -> None:
    rng = random.Random(0)
    running = [part(f"r{number}", rng.choice(ROLES)) for number in range(40)]
    wanted = placed("10E-10P-20D", ["cpu"], "w")
    steps = plan_change(running, [replace(one, kind="cpu") for one in wanted])
    assert {step.kind for step in steps} == {StepKind.SWITCH}
