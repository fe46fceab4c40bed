"""Changes of a running deployment: where they end, what serves on the way, and how few starts they take."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count, pairwise

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
    """What runs in the end; a stage that had an instance must have one at each moment."""
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


def fewest_starts(running: Iterable[str], wanted: Iterable[str]) -> int:
    """By trying everything, with any role in between."""
    begin, goal = tuple(sorted(running)), tuple(sorted(wanted))
    numbers, best = count(), {begin: 0}
    heap = [(0, next(numbers), begin)]
    while heap:
        cost, _, state = heapq.heappop(heap)
        if state == goal:
            return cost
        if cost > best[state]:
            continue
        found = [(cost + 1, (*state, role)) for role in ROLES] if len(state) <= len(goal) + 1 else []
        for index in range(len(state)):
            rest = state[:index] + state[index + 1 :]
            if serves(rest):
                found += [(cost, rest), *((cost, (*rest, role)) for role in ROLES)]
        for new_cost, after in found:
            key = tuple(sorted(after))
            if new_cost < best.get(key, 99):
                best[key] = new_cost
                heapq.heappush(heap, (new_cost, next(numbers), key))
    raise AssertionError("there is always a way on a CPU")


@given(fleets("r", most=3), fleets("w", most=4))
@settings(max_examples=60)
def test_no_other_way_has_fewer_starts(running: list[Part], wanted: list[Part]) -> None:
    running = [part(one.name, str(one.role)) for one in running]
    steps = plan_change(running, wanted)
    starts = sum(step.kind is StepKind.START for step in steps)
    assert starts == fewest_starts((str(one.role) for one in running), (str(one.role) for one in wanted))


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
        "start wd0 (D)",
        "start wp0 (P)",
        "switch epd0 from EPD to E",
    ]
    assert said(placed("E-P-D", cpu, ""), placed("EP-D", cpu, "w")) == ["switch e0 from E to EP", "stop p0 (P)"]
    swap = said(placed("EP-D", cpu, ""), placed("ED-P", cpu, "w"))
    assert [step.split()[0] for step in swap] == ["start", "switch", "stop"], "P and D are both the only ones"


def test_a_bridge_serves_while_others_change_places() -> None:
    devices = ["cuda:0", "cuda:1", "cuda:2"]
    steps = plan_change(placed("E-P-D", devices, ""), placed("E-D-P", devices, "w"))
    assert [str(step) for step in steps if step.name == "e0"] == [
        "switch e0 from E to EPD",
        "switch e0 from EPD to E",
    ]
    assert {step.kind for step in steps} == {StepKind.SWITCH}


def test_a_device_is_free_before_another_process_has_it() -> None:
    """Of another kind, as with another share: its process must end first, and others serve meanwhile."""
    running = placed("E-PD-PD", ["cuda:0", "cuda:1", "cuda:2"], "")
    wanted = [*running[:2], part("new", "PD", "other", devices=("cuda:2",))]
    assert said(running, wanted) == ["stop pd1 (PD)", "start new (PD)"]
    with pytest.raises(ChangeImpossible, match="list another device"):
        plan_change(placed("EPD", ["cuda:0"], ""), [part("new", "EPD", "other", devices=("cuda:0",))])


def test_new_settings_come_by_a_switch_or_with_another_process() -> None:
    stale = [part("e0", "E"), part("pd0", "PD"), part("pd1", "PD", is_current=False)]
    wanted = [part("we", "E"), part("w0", "PD"), part("w1", "PD")]
    steps = plan_change(stale, wanted)
    assert [step.kind for step in steps] == [StepKind.SWITCH] * 2 and steps[0].name == "pd1"
    assert as_counter(carry_out(stale, wanted, steps)) == as_counter(wanted)
    alone = plan_change([part("epd0", "EPD", is_current=False)], [part("w0", "EPD")])
    assert [str(step) for step in alone] == ["start w0 (EPD)", "stop epd0 (EPD)"]


def test_a_tensor_parallel_instance_stays_a_language_model() -> None:
    wide = ("cuda:0", "cuda:1")
    other = part("pd1", "PD", "a", devices=("cuda:2",))
    running = [part("pd0", "PD", wide, devices=wide), other]
    assert said(running, [part("w0", "P", wide, devices=wide), other]) == ["switch pd0 from PD to P"]
    with pytest.raises(ChangeImpossible):
        plan_change(running, [part("w0", "E", wide, devices=wide), other])


def test_large_deployments_are_planned_at_once() -> None:
    rng = random.Random(0)
    devices = [f"cuda:{number}" for number in range(32)]
    running = placed("4E-8P-20D", devices, "")
    wanted = placed("8E-12P-12D", devices, "w")
    steps = plan_change(running, wanted)
    assert len(steps) == 12 and {step.kind for step in steps} == {StepKind.SWITCH}
    cpu = [part(f"r{number}", rng.choice(ROLES)) for number in range(40)]
    assert plan_change(cpu, placed("10E-10P-20D", ["cpu"], "w"))
