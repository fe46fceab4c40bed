"""The controller's promises, with a load that flows: floor, cooldown, no thrashing, an answer to imbalance."""

from __future__ import annotations

import itertools

from fluid import Fluid
from hypothesis import given, settings
from hypothesis import strategies as st

from epd_serve.autoscale.controller import Controller, Kind, Order
from epd_serve.autoscale.instance_load import InstanceLoad
from epd_serve.autoscale.pressure import Limits
from epd_serve.config.sections import ElasticConfig
from epd_serve.types import Role, Stage, StageRate

LIMITS = Limits(ttft_s=2.0, tpot_s=0.05)
OPTIONS = ElasticConfig()
ALL = tuple(Stage)
#: Tokens a second of one decode instance within the limit: batches of 30.
MOST_TOKENS = 30 / 0.05

roles = st.lists(st.sampled_from(["E", "P", "D"]), min_size=0, max_size=6).map(lambda more: ["E", "P", "D", *more])
loads = st.fixed_dictionaries(
    {Stage.ENCODE: st.floats(0, 6), Stage.PREFILL: st.floats(0, 6), Stage.DECODE: st.floats(0, 6 * MOST_TOKENS)}
)


def controller(options: ElasticConfig = OPTIONS) -> Controller:
    return Controller(options, LIMITS, needed=ALL)


@settings(max_examples=20, deadline=None)
@given(roles, st.lists(loads, min_size=1, max_size=4), st.floats(0.2, 20), st.booleans())
def test_floor_and_cooldown_hold_under_any_load(
    start: list[str], changes: list[dict[Stage, float]], switch_s: float, refuses: bool
) -> None:
    fluid, one = Fluid(roles=start, load={}, switch_s=switch_s, refuses=refuses), controller()
    for load in changes:
        fluid.load = load
        for _ in range(40):
            fluid.flow(one, 1.0)
            assert all(fluid.count(stage) >= 1 for stage in ALL)
    times = [decision.at_s for decision in fluid.orders]
    assert all(later - earlier >= OPTIONS.cooldown_s for earlier, later in itertools.pairwise(times))


@settings(max_examples=10, deadline=None)
@given(roles, loads)
def test_a_layout_is_restored_only_under_more_pressure(start: list[str], load: dict[Stage, float]) -> None:
    """Whatever the load, and even where no layout is enough: so switches become ever rarer while it stays."""
    fluid, one = Fluid(roles=start, load=load), controller()
    left: dict[tuple[str, ...], tuple[float, float]] = {}
    for _ in range(300):
        layout = tuple(fluid.layout())
        fluid.flow(one, 1.0)
        decision = fluid.decisions[-1]
        if decision.order is None:
            continue
        worst = max(decision.pressures.values())
        left[layout] = decision.at_s, worst
        after = list(fluid.roles)
        after[int(decision.order.instance[1:])] = str(decision.order.role)
        at_s, pressure = left.get(tuple(sorted(after)), (-300.0, 0.0))
        assert worst > pressure or decision.at_s - at_s > 300.0
    assert len(fluid.orders) <= 2 * len(start)


@settings(max_examples=20, deadline=None)
@given(roles, st.data())
def test_a_lasting_imbalance_is_answered(start: list[str], data: st.DataObject) -> None:
    """A load that some layout of these instances carries easily is carried in the end, and that is all."""
    num_encode = data.draw(st.integers(1, len(start) - 2))
    num_prefill = data.draw(st.integers(1, len(start) - 1 - num_encode))
    num_decode = len(start) - num_encode - num_prefill
    part = data.draw(st.floats(0.2, 0.65))
    load = {
        Stage.ENCODE: part * num_encode,
        Stage.PREFILL: part * num_prefill,
        Stage.DECODE: part * num_decode * MOST_TOKENS,
    }
    fluid, one = Fluid(roles=list(start), load=load), controller()
    fluid.flow(one, 240.0)
    last = fluid.decisions[-1]
    assert max(last.pressures.values()) <= 1, (fluid.layout(), load, [one.reason for one in fluid.orders])
    num_orders = len(fluid.orders)
    fluid.flow(one, 100.0)
    assert len(fluid.orders) == num_orders


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 6), st.floats(0.3, 0.7), st.floats(1.5, 4.0))
def test_an_encoder_that_is_needed_stays(num: int, part: float, decodes: float) -> None:
    """However hard decode is pressed, and although nobody is seen busy whenever one looks."""
    load = {Stage.ENCODE: part * num, Stage.DECODE: decodes * MOST_TOKENS}
    fluid, one = Fluid(roles=["E"] * num + ["P", "D"], load=load, is_unseen=True), controller()
    fluid.flow(one, 150.0)
    assert max(decision.pressures.get(Stage.ENCODE, 0.0) for decision in fluid.decisions) <= 1, fluid.layout()


def test_a_late_stage_gets_instances_one_after_the_other() -> None:
    fluid = Fluid(roles=["E", "E", "E", "P", "D"], load={Stage.DECODE: 2 * MOST_TOKENS}, switch_s=3.0)
    one = controller()
    fluid.flow(one, 2.0)
    fluid.load = {Stage.DECODE: 3 * MOST_TOKENS}
    fluid.flow(one, 60.0)
    assert fluid.orders[0].order == Order(instance="i0", role=Role.parse("D"))
    assert {decision.kind for decision in fluid.decisions} >= {
        Kind.CALM,
        Kind.SWITCH,
        Kind.COOLDOWN,
        Kind.SWITCHING,
    }
    assert fluid.layout() == ["D", "D", "D", "E", "P"]


def test_a_late_failure_does_not_affect_the_next_order() -> None:
    one = controller()
    fluid = Fluid(roles=["E", "E", "E", "P", "D"], load={Stage.DECODE: 3 * MOST_TOKENS}, switch_s=1e9)
    while len(fluid.orders) < 2:
        fluid.flow(one, 1.0)
        assert fluid.now_s < 100
    first, second = (decision.order for decision in fluid.orders)
    assert first is not None and second is not None and first.instance != second.instance
    one.failed(first)  # as the one that carries it out hears at last
    fluid.flow(one, 1.0)
    assert fluid.decisions[-1].kind is Kind.SWITCHING


def test_switches_ordered_by_others_start_the_cooldown() -> None:
    fluid, one = Fluid(roles=["E", "E", "E", "P", "D"], load={Stage.DECODE: 4 * MOST_TOKENS}), controller()
    fluid.flow(one, 2.0)
    fluid.roles[0] = "D"
    at_s = fluid.now_s
    fluid.flow(one, 20.0)
    assert fluid.orders[0].at_s >= at_s + OPTIONS.cooldown_s
    assert any(decision.kind is Kind.COOLDOWN for decision in fluid.decisions)


def test_a_refused_order_is_not_repeated() -> None:
    one = controller()
    for name in ("i0", "i1", "i2"):
        one.refused(Order(instance=name, role=Role.parse("D")))
    fluid = Fluid(roles=["E", "E", "P", "D"], load={Stage.DECODE: 2 * MOST_TOKENS})
    fluid.flow(one, 60.0)
    assert not fluid.orders
    one.decide(fluid.now_s, fluid.seen()[1:])  # i0 has left, and comes again as another
    fluid.flow(one, 60.0)
    assert [decision.order.instance for decision in fluid.orders if decision.order] == ["i0"]


def seen(**serving: bool) -> list[InstanceLoad]:
    """Idle instances, by name, that serve or do not."""
    return [
        InstanceLoad(name=name, role=Role.parse(name[0].upper()), is_serving=value)
        for name, value in serving.items()
    ]


def test_a_decode_whose_steps_all_had_one_size_is_helped() -> None:
    """Nothing tells the two parts of such a step apart: all of it goes by the number of sequences (RateFit)."""

    def here(queue_s: float) -> list[InstanceLoad]:
        num = 1.0 if queue_s else 0.0
        step, waiting = StageRate(0.0, 0.003), {Stage.DECODE: queue_s}
        decode = InstanceLoad(name="d0", role=Role.parse("D"), queue_s=waiting, num_decoding=num, step=step)
        return [*seen(e0=True, e1=True, p0=True), decode]

    one = controller()
    decisions = [one.decide(float(at), here(0.0 if at < 5 else 4.0)) for at in range(10)]
    assert [decision.order for decision in decisions if decision.order] == [
        Order(instance="e0", role=Role.parse("D"))
    ]
