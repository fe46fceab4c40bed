"""Policies choose P and D."""

from contextlib import closing

import pytest

from epd_serve.errors import Unavailable
from epd_serve.protocol.instance_state import Load
from epd_serve.routing.routes import Demand, RoutePolicy
from epd_serve.types import Stage, StageRate

POLICY = RoutePolicy()
POLICIES = [RoutePolicy(), RoutePolicy("round_robin"), RoutePolicy("prefix_affinity")]


def names(table, policy=POLICY, **more):
    route = policy.choose_route(table, "m", **more)
    return route.prefill.name, route.decode.name


def test_the_cheapest_pair(build):
    table = build("p0:P:tokens=900", "p1:P:tokens=100", "d0:D:sequences=5", "d1:D:sequences=40")
    route = POLICY.choose_route(table, "m")
    assert (route.prefill.name, route.decode.name, route.fused) == ("p1", "d0", False)


def test_load_is_seconds_and_not_requests(build):
    """p1 has more tokens to do and is so much faster that it is done first."""
    table = build("p0:P:tokens=100", "p1:P", "d0:D")
    fast = build.load("tokens=500", rates={"P": StageRate(0.0, 1e-5)})
    build.update(table, "p1:P", load=fast)
    assert names(table, demand=Demand(num_tokens=100))[0] == "p1"


def test_own_calls_count_until_they_end_or_are_reported(build):
    table = build("p0:P", "p1:P", "d0:D")
    demand = Demand(num_tokens=100)
    route = POLICY.choose_route(table, "m", demand=demand)
    assert route.prefill.name == "p0"
    with closing(table.open_call(route.prefill, Stage.PREFILL, work=route.prefill_work)):
        assert table["p0"].prefill_s == pytest.approx(0.1)
        assert names(table, demand=demand)[0] == "p1"
    assert table["p0"].prefill_s == 0


@pytest.mark.parametrize("policy", [RoutePolicy(), RoutePolicy("round_robin")])
def test_equals_take_turns(build, policy):
    table = build("p0:P", "p1:P", "d0:D", "d1:D")
    chosen = []
    for _ in range(8):
        route = policy.choose_route(table, "m")
        for record, stage in ((route.prefill, Stage.PREFILL), (route.decode, Stage.DECODE)):
            chosen.append(record.name)
            table.open_call(record, stage).close()
    assert [chosen.count(name) for name in ("p0", "p1", "d0", "d1")] == [4] * 4


def test_an_instance_with_both_stages_decodes_what_it_prefilled(build):
    route = POLICY.choose_route(build("e0:E", "pd0:PD:sequences=3", "d0:D"), "m")
    assert (route.prefill.name, route.decode.name, route.fused) == ("pd0", "pd0", True)
    assert names(build("p0:P", "ed0:ED")) == ("p0", "ed0")
    assert POLICY.choose_route(build("epd0:EPD"), "m").fused


def test_fused_and_apart_are_compared_by_what_they_cost(build):
    assert not POLICY.choose_route(build("pd0:PD:tokens=900:sequences=9", "p0:P", "d0:D"), "m").fused
    assert POLICY.choose_route(build("pd0:PD:tokens=100", "p0:P:tokens=900", "d0:D:sequences=9"), "m").fused


def test_a_decode_instance_on_the_same_host_is_nearer(build):
    table = build("p0:P", "d0:D", "d1:D", host_id="here")
    build.update(table, "d0:D", host_id="there")
    long = Demand(num_tokens=50_000)
    assert names(table, demand=long) == ("p0", "d1")
    for number in range(4):
        table.open_call(table["d1"], Stage.DECODE, request_id=str(number)).close()
    assert names(table, demand=long) == ("p0", "d1"), "whoever's turn it is"
    build.update(table, "d1:D:sequences=500")
    assert names(table, demand=long) == ("p0", "d0"), "near but busy"


def test_a_full_kv_cache_is_a_wait(build):
    table = build("p0:P", "d0:D", "d1:D")
    build.update(table, "d0:D", load=build.load("sequences=2", total_blocks=100, free_blocks=5))
    build.update(table, "d1:D", load=build.load("sequences=4", total_blocks=100, free_blocks=98))
    assert names(table, demand=Demand(num_tokens=50))[1] == "d0"
    assert names(table, demand=Demand(num_tokens=1500))[1] == "d1"
    assert table["d0"].room_s(50) == 0.0
    assert 0 < table["d0"].room_s(500) < table["d0"].room_s(1000)


def test_a_prompt_goes_to_a_decode_instance_that_holds_it(build):
    table = build("p0:P", "d0:D", "d1:D:sequences=30")
    build.update(table, "d0:D", max_model_len=512)
    assert names(table, demand=Demand(num_tokens=500))[1] == "d0"
    route = POLICY.choose_route(table, "m", demand=Demand(num_tokens=600))
    assert (route.decode.name, route.max_model_len) == ("d1", 100_000)
    build.update(table, "d1:D", max_model_len=512)
    assert names(table, demand=Demand(num_tokens=600))[1] in ("d0", "d1"), "then it is told why not"


@pytest.mark.parametrize("policy", POLICIES)
def test_an_instance_that_is_lost_or_excluded_or_of_another_model_is_not_chosen(build, policy):
    table = build("p0:P", "p1:P:tokens=90", "d0:D")
    assert names(table, policy, exclude={"p0"})[0] == "p1"
    table.mark_lost("p0")
    assert names(table, policy)[0] == "p1"
    table.mark_lost("p1")
    with pytest.raises(Unavailable, match="waiting for p0, p1"):
        policy.choose_route(table, "m")
    assert table.missing_stages() == [Stage.PREFILL]
    build.update(table, "p1:P", model="other")
    for other in (table, build("e0:E", "d0:D"), build("e0:E", "p0:P")):
        with pytest.raises(Unavailable):
            policy.choose_route(other, "m")


def test_a_prompt_follows_its_beginning_until_that_costs_more_than_it_saves(build):
    table, policy = build("p0:P", "p1:P", "d0:D"), RoutePolicy("prefix_affinity")
    start = (256, b"hello")
    first = Demand(num_tokens=300, prefix=(start,), prefix_characters=300)
    route = policy.choose_route(table, "m", demand=first)
    table.open_call(route.prefill, Stage.PREFILL, work=route.prefill_work, prefix=route.prefix).close()
    home, other = route.prefill.name, {"p0": "p1", "p1": "p0"}[route.prefill.name]
    longer = Demand(num_tokens=512, prefix=(start, (512, b"hello again")), prefix_characters=512)
    for _ in range(3):
        assert names(table, policy, demand=longer)[0] == home
    assert policy.choose_route(table, "m", demand=longer).prefill_work.num_tokens == 256
    build.update(table, f"{home}:P:tokens=200")
    assert names(table, policy, demand=longer)[0] == home, "0.2 s to wait, 0.256 s to save"
    build.update(table, f"{home}:P:tokens=400")
    assert names(table, policy, demand=longer)[0] == other
    again = build(f"{other}:P", f"{home}:P", "d0:D")
    assert names(again, policy, demand=first)[0] == home, "another gateway sends it to the same place"
    build.update(table, f"{home}:P", pid=2)
    assert policy.choose_route(table, "m", demand=longer).prefill_work.num_tokens == 512, "a new process is cold"


def test_rates_that_are_missing_or_old_are_those_of_another(build):
    table = build("p0:P", "p1:P", load=Load())
    build.update(table, "p0:P", load=Load(rates={"P": StageRate(0.5, 0.1)}))
    build.update(table, "p1:P", load=Load())
    assert table["p1"].costs.prefill == StageRate(0.5, 0.1)
    build.update(table, "p1:P", load=Load(rates={"P": StageRate(9.0, 9.0, is_fresh=False)}))
    assert table["p1"].costs.prefill.base_s == 0.5, "p0 has measured it lately"
    build.update(table, "p0:P", load=Load(rates={"P": StageRate(0.5, 0.1, is_fresh=False)}))
    build.update(table, "p1:P", load=Load(rates={"P": StageRate(9.0, 9.0, is_fresh=False)}))
    assert table["p1"].costs.prefill.base_s == 9.0, "better than nothing"


def test_a_draining_instance_gets_no_request(build):
    table = build("p0:P", "p1:P:tokens=900", "d0:D")
    table["p0"].drains.add("operator")
    assert table["p0"].state == "draining" and names(table)[0] == "p1"
    table["p0"].drains.clear()
    assert table["p0"].state == "up" and names(table)[0] == "p0"


def assisted(build, num_waiting, assistant="epd0:EPD"):
    table = build("pd0:PD", "pd1:PD")
    for name in ("pd0", "pd1"):
        load = build.load(num_waiting=num_waiting // 2, free_blocks=10_000, total_blocks=10_000)
        build.update(table, f"{name}:PD", load=load)
    table.add("epd0", "http://epd0")
    build.update(table, assistant, load=build.load(free_blocks=1000, total_blocks=1000), assists=True)
    return table


def test_encoders_assist_while_the_language_queue_is_long(build):
    """HeteroServe, algorithm 1: texts alone, above the threshold, with nothing to encode and room for a batch."""
    text, picture = Demand(num_tokens=50), Demand(num_tokens=50, num_pixels=1000)
    assert names(assisted(build, 16), demand=text)[0] != "epd0", "not above the threshold"
    table = assisted(build, 18)
    assert names(table, demand=text) == ("epd0", "epd0")
    assert names(table, demand=picture)[0] != "epd0"
    assert names(table, demand=text, exclude={"epd0"})[0] != "epd0"
    assert names(table, demand=Demand(num_tokens=20_000))[0] != "epd0", "no room for its KV"
    with table.open_encode(table["epd0"], build.item("cat")):
        assert names(table, demand=text)[0] != "epd0", "it encodes"
    assert all(take(table, text) for _ in range(16))
    assert names(table, demand=text)[0] != "epd0", "its batch is full"


def take(table, demand):
    """Open a call where the next request goes; whether that is the assistant."""
    route = POLICY.choose_route(table, "m", demand=demand)
    table.open_call(route.prefill, Stage.PREFILL, request_id=str(table.num_calls), work=route.prefill_work)
    return route.prefill.name == "epd0"


def test_an_assistant_alone_prefills_nothing(build):
    table = build("epd0:EPD", assists=True)
    with pytest.raises(Unavailable, match="prefill"):
        POLICY.choose_route(table, "m")
