"""Policies choose an encoder for each item."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.routing import encoders
from epd_serve.routing.encoders import BOUND, EVEN, choose_encoders


def chosen(table, *items, prefill="p0", exclude=()):
    return [one.name for one in choose_encoders(table, table[prefill], items, exclude=exclude)]


def test_items_of_one_request_spread(build):
    table = build("e0:E", "e1:E:pixels=1000", "e2:E", "p0:P")
    items = [build.item(f"item {number}") for number in range(5)]
    assert sorted(chosen(table, *items)) == ["e0", "e0", "e1", "e2", "e2"]


def test_equal_items_meet_in_one_place_whoever_asks(build):
    tables = [build("e0:E", "e1:E", "e2:E", "p0:P"), build("e2:E", "p0:P", "e1:E", "e0:E")]
    items = [build.item(f"item {number}") for number in range(60)]
    homes = [[chosen(table, item) for item in items] for table in tables]
    assert homes[0] == homes[1], "two gateways agree"
    for name in ("e0", "e1", "e2"):
        assert homes[0].count([name]) > 10
    without = [chosen(tables[0], item, exclude={"e1"}) for item in items]
    moved = [old for old, new in zip(homes[0], without, strict=True) if old != new]
    assert moved == [["e1"]] * homes[0].count(["e1"]), "only its own items go elsewhere"


def test_an_item_that_is_being_encoded_is_not_encoded_elsewhere_too(build):
    table = build("e0:E:pixels=9000", "e1:E", "p0:P")
    picture, other = build.item("picture"), build.item("other")
    with table.open_encode(table["e0"], picture):
        assert table["e0"].pending.num_pixels == 10_000
        assert chosen(table, picture, other) == ["e0", "e1"]
        assert chosen(table, picture, exclude={"e0"}) == ["e1"]
        with table.open_encode(table["e0"], picture):
            assert table["e0"].pending.num_pixels == 10_000, "one encode serves both"
        assert chosen(table, picture) == ["e0"]
    assert not table["e0"].encoding


def test_an_item_goes_where_its_feature_is_and_is_no_work_there(build):
    table = build("e0:E", "e1:E", "p0:P")
    item = build.item("picture")
    [home] = chosen(table, item)
    other = {"e0": "e1", "e1": "e0"}[home]
    build.update(table, f"{home}:E:pixels=50000")
    assert chosen(table, item) == [other], "too much to do"
    with table.open_encode(table[other], item):
        pass
    build.update(table, f"{home}:E")
    build.update(table, f"{other}:E:pixels=50000")
    assert chosen(table, item) == [other], "it has the feature, its queue is no matter"
    with table.open_encode(table[other], item):
        assert table[other].pending.num_pixels == 50_000
    build.update(table, f"{other}:E:pixels=50000", pid=2)
    assert chosen(table, item) == [home], "another process has nothing"


def test_a_failed_encode_leaves_no_feature(build):
    table = build("e0:E", "p0:P")
    with pytest.raises(ZeroDivisionError), table.open_encode(table["e0"], build.item("picture")):
        raise ZeroDivisionError
    assert "picture" not in table["e0"].features
    assert not table["e0"].encoding
    assert table["e0"].pending.num_pixels == 0


def test_an_item_stays_at_p_unless_another_would_be_done_sooner(build):
    item = build.item("picture", 100_000)  # 0.1 s
    assert chosen(build("e0:E", "ep0:EP"), item, prefill="ep0") == ["ep0"], "it need not move"
    waiting = build("e0:E", "ep0:EP:pixels=200000")
    assert chosen(waiting, item, prefill="ep0") == ["e0"]
    busy = build("e0:E", "ep0:EP:tokens=500")
    assert chosen(busy, item, prefill="ep0") == ["e0"], "its prompts would wait for the encode"
    both = build("e0:E:pixels=300000", "ep0:EP:tokens=500")
    assert chosen(both, item, prefill="ep0") == ["ep0"]
    table = build("e0:E", "ep0:EP")
    with table.open_encode(table["e0"], item):
        pass
    assert chosen(table, item, prefill="ep0") == ["e0"], "a feature that is there costs its way only"


def test_without_an_encoder_p_encodes_itself(build):
    table = build("e0:E", "p0:P")
    build.update(table, "e0:E", media_fingerprint="another model revision")
    a, b = build.item("a"), build.item("b")
    assert chosen(table, a, b) == ["p0", "p0"]
    table = build("e0:E", "p0:P")
    table.mark_lost("e0")
    assert chosen(table, a) == ["p0"]
    assert chosen(build("e0:E", "p0:P"), a, exclude={"e0"}) == ["p0"]


@given(
    st.lists(st.integers(0, 6_000), min_size=1, max_size=5),
    st.lists(st.integers(1, 5_000), min_size=1, max_size=9),
)
def test_no_encoder_gets_more_than_its_share(build, loads, sizes):
    """After each item the one that got it has at most BOUND times the mean, or one item more than the mean."""
    table = build("p0:P", *(f"e{index}:E:pixels={load}" for index, load in enumerate(loads)))
    items = [build.item(f"item {number}", size) for number, size in enumerate(sizes)]
    to_do = {f"e{index}": load for index, load in enumerate(loads)}
    for name, item in zip(chosen(table, *items), items, strict=True):
        mean = (sum(to_do.values()) + item.width) / len(to_do)
        to_do[name] += item.width
        assert to_do[name] <= max(BOUND * mean, mean + item.width) + 1e-3


@pytest.mark.parametrize(("bound", "even", "most"), [(BOUND, EVEN, 1.12), (float("inf"), float("inf"), 1.5)])
def test_over_time_all_get_about_the_same(build, monkeypatch, bound, even, most):
    """Where each item is done before the next one comes, and no queue says who has got more."""
    table = build("e0:E", "e1:E", "e2:E", "e3:E", "p0:P")
    sizes = [1_000 * (1 + number % 5) for number in range(400)]
    monkeypatch.setattr(encoders, "BOUND", bound)
    monkeypatch.setattr(encoders, "EVEN", even)
    got = dict.fromkeys(("e0", "e1", "e2", "e3"), 0)
    for number, size in enumerate(sizes):
        item = build.item(f"{bound} {even} {number}", size)
        [name] = chosen(table, item)
        with table.open_encode(table[name], item):
            got[name] += size
    assert max(got.values()) * 4 / sum(got.values()) <= most
