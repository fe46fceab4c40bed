"""When thieves take what (HeteroServe, section 5.3)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.errors import Unavailable
from epd_serve.flow.stealing import DEFAULT_RULE, Mode, StealRule, Thief, Thieves
from epd_serve.routing.routes import ANY, LeastLoaded
from epd_serve.types import Stage

RULE = DEFAULT_RULE


def take(thief: Thief, now: float = 0.0, *, items: int = 0, queued: int = 0, held: int = 0) -> int:
    return thief.take(now, num_items=items, num_queued=queued, num_held=held)


def test_the_papers_rule():
    thief = Thief(RULE)
    assert take(thief, queued=16) == 0, "the datacenter pool takes that many at once"
    assert take(thief, items=1, queued=100) == 0 and thief.mode is Mode.VISION
    assert take(thief, queued=17) == 8 and thief.mode is Mode.LANGUAGE, "half a batch"
    assert take(thief, queued=17, held=8) == 8
    assert take(thief, queued=17, held=16) == take(thief, queued=17, held=9) == 0, "no whole half has room"
    assert take(thief, items=1, queued=17) == 0
    assert take(thief) == 0 and thief.mode is Mode.IDLE


def test_a_half_that_the_queue_cannot_fill_is_collected_for_a_while():
    thief = Thief(StealRule(threshold=2, batch=16, collect_s=0.1))
    assert take(thief, 0.0, queued=3) == 3
    assert thief.collects_until_s == pytest.approx(0.1)
    assert take(thief, 0.05, queued=1, held=3) == 1, "the threshold is for the first of them"
    assert take(thief, 0.2, queued=1, held=4) == 0, "the collection is over"
    assert thief.collects_until_s is None
    assert take(thief, 0.3, queued=4, held=4) == 4
    assert take(thief, 0.31, items=1, queued=4, held=8) == 0
    assert take(thief, 0.32, queued=2, held=8) == 0, "vision has ended that collection"


@dataclass
class World:
    """The world of a thief: images that come and go, a queue, sequences that end."""

    items: int = 0
    queued: int = 0
    held: int = 0
    arrivals: int = 0
    now: float = 0.0


MOVES = st.sampled_from(["image", "encoded", "request", "served", "ended", "wait"])
RULES = st.builds(
    StealRule,
    threshold=st.integers(0, 6),
    batch=st.integers(2, 8),
    collect_s=st.sampled_from([0.0, 0.1, 1.0]),
)


@given(rule=RULES, moves=st.lists(MOVES, max_size=80))
def test_no_vision_starvation_and_no_thrashing(rule: StealRule, moves: list[str]) -> None:
    """Properties 1 and 3: nothing is taken while images wait, and only an image that came ends language work."""
    thief, world = Thief(rule), World()
    for move in moves:
        if move == "image":
            world.items += 1
            world.arrivals += 1
        elif move == "encoded":
            world.items = max(world.items - 1, 0)
        elif move == "request":
            world.queued += 3
        elif move == "served":
            world.queued = max(world.queued - 1, 0)
        elif move == "ended":
            world.held = max(world.held - 1, 0)
        else:
            world.now += 0.07
        collecting = thief.collects_until_s
        count = take(thief, world.now, items=world.items, queued=world.queued, held=world.held)
        assert 0 <= count <= min(rule.half, world.queued)
        if world.items:
            assert count == 0 and thief.mode is Mode.VISION
        if count and collecting is None:
            assert world.queued > rule.threshold
        world.queued -= count
        world.held += count
        assert world.held <= rule.batch
        to_vision = sum(n for (_, mode), n in thief.num_switches.items() if mode is Mode.VISION)
        from_vision = sum(n for (mode, _), n in thief.num_switches.items() if mode is Mode.VISION)
        assert to_vision <= world.arrivals and from_vision <= to_vision


def test_thieves_get_encodes_and_no_prompts(build):
    table = build("epd0:EPD", "pd0:PD:tokens=100000", steals=False)
    build.update(table, "epd0:EPD", steals=True)
    assert table.has_thieves
    route = LeastLoaded().choose_route(table, "m", demand=ANY)
    assert route.names == {"pd0"}
    assert [one.name for one in table.ready(Stage.ENCODE)] == ["epd0"]
    table.mark_lost("pd0")
    assert LeastLoaded().choose_route(table, "m").names == {"epd0"}, "better than nobody"
    with pytest.raises(Unavailable):
        LeastLoaded().choose_route(table, "m", exclude={"epd0"})


def test_several_thieves_share_the_queue_and_do_not_take_twice(build):
    table = build("pd0:PD")
    for name in ("epd0", "epd1"):
        table.add(name, "")
        build.update(table, f"{name}:EPD", steals=True)
    thieves = Thieves(replace(DEFAULT_RULE, threshold=4, batch=8))
    assert [one.name for one in thieves.take(table, "m", 4, 0.0)] == []
    takers = [one.name for one in thieves.take(table, "m", 8, 0.0)]
    assert takers == ["epd0"] * 4, "what the first left is no longer than the threshold"
    for name in takers:
        thieves.took(name)
    assert [one.name for one in thieves.take(table, "m", 30, 0.0)] == ["epd0"] * 4 + ["epd1"] * 4
    with table.encoding(table["epd1"], build.item("picture")):
        for name in takers:
            thieves.took(name)
        assert thieves.take(table, "m", 30, 0.0) == [], "one is full, the other encodes"
    table.mark_lost("pd0")
    assert thieves.take(table, "m", 30, 0.0) == [], "all of it comes to them by itself"


@pytest.mark.parametrize("wrong", [{"threshold": -1}, {"batch": 1}, {"collect_s": -1.0}])
def test_a_rule_without_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="stealing needs"):
        replace(DEFAULT_RULE, **wrong)
