"""Changes of a running deployment: where they end, what serves on the way, and how few starts they take."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd_serve.topology import parse_topology, place
from epd_serve.topology.change import ChangeImpossible, ChangeNotFound, Step, StepKind, plan_change
from epd_serve.topology.change_states import Part
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


Cost = tuple[int, int, int, int]
Instances = tuple[tuple[str, str, bool], ...]


def stages(instances: Iterable[tuple[str, str, bool]]) -> set[str]:
    return set("".join(role for _, role, _ in instances))


def least_cost(running: Sequence[Part], wanted: Sequence[Part]) -> Cost | None:
    """Starts, gaps in encoding, switches and stops, by trying everything, any role in between; None: no way."""
    devices = {str(one.kind): set(one.devices) - {"cpu"} for one in (*running, *wanted)}
    begin, goal = (
        tuple(sorted((str(one.kind), str(one.role), one.is_current) for one in parts))
        for parts in (running, wanted)
    )
    counts_encoders = "E" in stages(begin) and "E" in stages(goal)
    final = Counter(kind for kind, _, _ in goal)

    def has_room(kind: str, state: Instances) -> bool:
        now = Counter(kind for kind, _, _ in state)
        if not devices[kind]:
            return len(state) <= len(goal)  # one more than in the end is enough
        return now[kind] < final[kind] and all(
            now[k] <= final[k] for k, own in devices.items() if own & devices[kind]
        )

    numbers, best = count(), {begin: (0, 0, 0, 0)}
    heap: list[tuple[Cost, int, Instances]] = [((0, 0, 0, 0), next(numbers), begin)]
    while heap:
        cost, _, state = heapq.heappop(heap)
        if state == goal:
            return cost
        if cost > best[state]:
            continue
        found: list[tuple[StepKind, Instances, Instances]] = [
            (StepKind.START, state, (*state, label))
            for label in set(goal)
            if goal.count(label) > state.count(label) and has_room(label[0], state)
        ]
        for index, (kind, role, _) in enumerate(state):
            rest = state[:index] + state[index + 1 :]
            if {"P", "D"} <= stages(rest):
                found += [(StepKind.SWITCH, rest, (*rest, (kind, new, True))) for new in ROLES if new != role]
                if sum(one[0] == kind for one in state) > final[kind]:
                    found.append((StepKind.STOP, rest, rest))
        for step, meanwhile, after in found:
            gap = counts_encoders and "E" not in stages(meanwhile)
            one = (step is StepKind.START, gap, step is StepKind.SWITCH, step is StepKind.STOP)
            new_cost = tuple(map(sum, zip(cost, one, strict=True)))
            key = tuple(sorted(after))
            if key not in best or new_cost < best[key]:
                best[key] = new_cost
                heapq.heappush(heap, (new_cost, next(numbers), key))
    return None


def cost_of(running: Sequence[Part], wanted: Sequence[Part], steps: Sequence[Step]) -> Cost:
    counts_encoders = all(any(one.role.encodes for one in parts) for parts in (running, wanted))
    now, gaps = {one.name: one.role for one in running}, 0
    for step in steps:
        now.pop(step.name, None)
        gaps += counts_encoders and not any(role.encodes for role in now.values())
        if step.kind is not StepKind.STOP:
            now[step.name] = step.role
    kinds = Counter(step.kind for step in steps)
    return kinds[StepKind.START], gaps, kinds[StepKind.SWITCH], kinds[StepKind.STOP]


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


@given(st.one_of(*(st.tuples(one("r"), one("w")) for one in (on_devices, lambda prefix: fleets(prefix, most=3)))))
@settings(max_examples=60)
def test_no_other_way_costs_less(both: tuple[list[Part], list[Part]]) -> None:
    running, wanted = both
    least = least_cost(running, wanted)
    if least is None:
        with pytest.raises(ChangeImpossible):
            plan_change(running, wanted)
    else:
        assert cost_of(running, wanted, plan_change(running, wanted)) == least


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


def test_large_deployments_are_planned_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epd_serve.topology.change._MOST_LOOKS", 1000)
    rng = random.Random(0)
    devices = [f"cuda:{number}" for number in range(32)]
    running = placed("4E-8P-20D", devices, "")
    wanted = placed("8E-12P-12D", devices, "w")
    steps = plan_change(running, wanted)
    assert len(steps) == 12 and {step.kind for step in steps} == {StepKind.SWITCH}
    cpu = [part(f"r{number}", rng.choice(ROLES)) for number in range(40)]
    assert plan_change(cpu, placed("10E-10P-20D", ["cpu"], "w"))


@pytest.mark.parametrize(
    ("before", "after"),
    [("2E-6P-8D", "2E-6P-8D"), ("2E-6P-8D", "8D-6P-2E"), ("E-P-14D", "E-P-14D"), ("16EPD", "16EPD")],
)
@pytest.mark.parametrize("change", ["roles", "settings", "processes"])
def test_so_are_equal_devices(before: str, after: str, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has one instance; which of those that are alike comes first does not matter."""
    monkeypatch.setattr("epd_serve.topology.change._MOST_LOOKS", 1000)
    devices = [f"cuda:{number}" for number in range(16)]
    running, wanted = placed(before, devices, ""), placed(after, devices, "w")
    if change == "settings":
        running = [replace(one, is_current=False) for one in running]
    if change == "processes":
        running = [replace(one, kind=("old", one.kind)) for one in running]
    steps = plan_change(running, wanted)
    assert as_counter(carry_out(running, wanted, steps)) == as_counter(wanted)
    if change == "processes":
        extra = before == "E-P-14D"  # another one takes the place of the only P for a while
        assert cost_of(running, wanted, steps) == (16, 0, extra, 16)
        orders = [step for step in steps if step.kind is not StepKind.SWITCH]
        assert {step.kind for step in orders[::2]} == {StepKind.STOP}, "one device follows the other"
    elif before != after:
        assert cost_of(running, wanted, steps) == (0, 0, 16, 0)
    else:
        assert cost_of(running, wanted, steps) == (0, 0, 32 if change == "settings" else 0, 0)


def test_a_search_that_is_given_up_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epd_serve.topology.change._MOST_LOOKS", 1)
    with pytest.raises(ChangeNotFound, match="though there may be one"):
        plan_change(placed("2P-2D", ["cpu"], ""), placed("2EP-2ED", ["cpu"], "w"))
