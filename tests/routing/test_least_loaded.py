import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.errors import Unavailable
from epd_serve.protocol.wire import InstanceInfo, Load
from epd_serve.routing.policy import LeastLoaded
from epd_serve.routing.table import InstanceTable
from epd_serve.types import Stage

POLICY = LeastLoaded()


def table_of(*instances: str, fingerprint: str = "f", ready: bool = True) -> InstanceTable:
    """``table_of("p0:P", "d0:D:3")``: name, role and reported number of running requests."""
    table = InstanceTable([(one.split(":")[0], f"http://{one}") for one in instances])
    for one in instances:
        update(table, one, fingerprint=fingerprint, ready=ready)
    return table


def update(table: InstanceTable, one: str, *, fingerprint="f", ready=True, model="m") -> None:
    name, role, running, *_ = [*one.split(":"), "0"]
    table.update(
        name,
        InstanceInfo(
            name=name,
            role=role,
            url="",
            model=model,
            model_path="/m",
            max_model_len=9,
            media_fingerprint=fingerprint,
            device="cpu",
            dtype="float32",
            pid=1,
            ready=ready,
            load=Load(num_running=int(running)),
        ),
    )


def test_the_least_loaded_pair():
    table = table_of("p0:P:2", "p1:P:1", "d0:D:5", "d1:D:4")
    route = POLICY.choose_route(table, "m")
    assert (route.prefill.name, route.decode.name, route.fused) == ("p1", "d1", False)


def test_own_calls_count_as_load_until_they_end():
    table = table_of("p0:P", "p1:P", "d0:D")
    with table.in_flight(table["p0"], Stage.PREFILL):
        assert table["p0"].load == 1
        assert POLICY.choose_route(table, "m").prefill.name == "p1"
    assert table["p0"].load == 0
    with pytest.raises(ZeroDivisionError), table.in_flight(table["p0"], Stage.PREFILL):
        raise ZeroDivisionError
    assert table["p0"].load == 0


def test_equals_take_turns():
    table = table_of("p0:P", "p1:P", "d0:D")
    chosen = []
    for _ in range(4):
        route = POLICY.choose_route(table, "m")
        chosen.append(route.prefill.name)
        with table.in_flight(route.prefill, Stage.PREFILL):
            pass
    assert sorted(chosen) == ["p0", "p0", "p1", "p1"]


def test_an_instance_with_both_stages_decodes_what_it_prefilled():
    route = POLICY.choose_route(table_of("e0:E", "pd0:PD:3", "d0:D"), "m")
    assert (route.prefill.name, route.decode.name, route.fused) == ("pd0", "pd0", True)
    route = POLICY.choose_route(table_of("p0:P", "ed0:ED"), "m")
    assert (route.prefill.name, route.decode.name) == ("p0", "ed0")
    assert POLICY.choose_route(table_of("epd0:EPD"), "m").fused


def test_fused_and_apart_are_compared_by_the_load_they_meet():
    assert not POLICY.choose_route(table_of("pd0:PD:3", "p0:P:1", "d0:D:1"), "m").fused
    assert POLICY.choose_route(table_of("pd0:PD:1", "p0:P:3", "d0:D:3"), "m").fused


@pytest.mark.parametrize(
    ("instances", "words"),
    [
        (["e0:E", "d0:D"], r"prefill \(P\).*the deployment has none"),
        (["e0:E", "p0:P"], r"decode \(D\).*the deployment has none"),
    ],
)
def test_a_missing_stage_is_named(instances, words):
    with pytest.raises(Unavailable, match=words):
        POLICY.choose_route(table_of(*instances), "m")


def test_an_instance_that_is_lost_or_excluded_or_of_another_model_is_not_chosen():
    table = table_of("p0:P", "p1:P:9", "d0:D")
    assert POLICY.choose_route(table, "m", exclude={"p0"}).prefill.name == "p1"
    table.mark_lost("p0")
    assert POLICY.choose_route(table, "m").prefill.name == "p1"
    table.mark_lost("p1")
    with pytest.raises(Unavailable, match="waiting for p0, p1"):
        POLICY.choose_route(table, "m")
    assert table.missing_stages() == [Stage.PREFILL]
    update(table, "p1:P", model="other")
    with pytest.raises(Unavailable):
        POLICY.choose_route(table, "m")
    assert POLICY.choose_route(table_of("pd0:PD"), "m").fused


def encoders(table: InstanceTable, *items: str, prefill: str = "p0", exclude: set[str] | None = None) -> list[str]:
    records = POLICY.choose_encoders(table, table[prefill], items, exclude=exclude or ())
    return [record.name for record in records]


def test_items_of_one_request_spread():
    table = table_of("e0:E", "e1:E:1", "e2:E", "p0:P")
    chosen = encoders(table, *(f"item {number}" for number in range(5)))
    assert sorted(chosen) == ["e0", "e0", "e1", "e2", "e2"]


def test_equal_items_meet_in_one_place_whoever_asks():
    tables = [table_of("e0:E", "e1:E", "e2:E", "p0:P"), table_of("e2:E", "p0:P", "e1:E", "e0:E")]
    homes = [[encoders(table, f"item {number}") for number in range(60)] for table in tables]
    assert homes[0] == homes[1], "two gateways agree"
    for name in ("e0", "e1", "e2"):
        assert homes[0].count([name]) > 10
    without = [encoders(tables[0], f"item {number}", exclude={"e1"}) for number in range(60)]
    moved = [old for old, new in zip(homes[0], without, strict=True) if old != new]
    assert moved == [["e1"]] * homes[0].count(["e1"]), "only its own items go elsewhere"


def test_an_item_that_is_being_encoded_is_not_encoded_elsewhere_too():
    table = table_of("e0:E:9", "e1:E", "p0:P")
    with table.in_flight(table["e0"], Stage.ENCODE, "picture"):
        assert encoders(table, "picture", "other") == ["e0", "e1"]
        assert encoders(table, "picture", exclude={"e0"}) == ["e1"]
        with table.in_flight(table["e0"], Stage.ENCODE, "picture"):
            pass
        assert encoders(table, "picture") == ["e0"]
    assert encoders(table, "picture") == ["e1"]
    assert not table["e0"].encoding


def test_an_encoder_in_p_wins_among_equals():
    assert encoders(table_of("e0:E", "ep0:EP"), "picture", prefill="ep0") == ["ep0"]
    assert encoders(table_of("e0:E", "ep0:EP:2"), "picture", prefill="ep0") == ["e0"]


def test_without_an_encoder_p_encodes_itself():
    table = table_of("e0:E", "p0:P")
    update(table, "e0:E", fingerprint="another model revision")
    assert encoders(table, "a", "b") == ["p0", "p0"]
    assert encoders(table_of("e0:E", "p0:P"), "a", exclude={"e0"}) == ["p0"]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(0, 12))
def test_no_encoder_gets_more_than_its_share(loads, num_items):
    table = table_of("p0:P", *(f"e{index}:E:{load}" for index, load in enumerate(loads)))
    chosen = encoders(table, *(f"item {number}" for number in range(num_items)))
    assert len(chosen) == num_items
    after = [load + chosen.count(f"e{index}") for index, load in enumerate(loads)]
    for index in range(len(loads)):
        if chosen.count(f"e{index}"):
            assert after[index] <= math.ceil(sum(after) / len(loads))


def test_names_must_be_unique():
    with pytest.raises(ValueError, match="unique"):
        InstanceTable([("a", "http://x"), ("a", "http://y")])
