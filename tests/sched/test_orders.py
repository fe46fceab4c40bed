from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from sequences import sequence

from epd_serve.cache.block_pool import BlockPool
from epd_serve.sched.queues import PATIENCE, Order
from epd_serve.sched.schedule import Budget
from epd_serve.sched.step_cost import StepCost

TTFT_S = 2.0


def order(name, cached=0):
    """Over blocks of one token, of which the first ``cached`` of each prompt that has hashes are known; a token
    takes 0.01 s."""
    pool = BlockPool(cached + 2, 1)
    for block in pool.allocate(cached):
        pool.register(block, bytes([block]))
    return Order(name, pool, Budget(max_num_tokens=10_000, max_num_seqs=1), StepCost(token_s=0.01), TTFT_S)


ORDERS = {name: order(name) for name in ("fcfs", "sjf", "slack")}
times = st.integers(0, 400).map(lambda n: n / 16)
sequences = st.builds(
    lambda tokens, arrival_s, output: sequence(tokens, output=output, arrival_s=arrival_s),
    st.integers(1, 300),
    times,
    st.sampled_from((0, 0, 0, 1)),
)


def names(ordered):
    return "".join(one.request_id for one in ordered)


@given(st.sampled_from(sorted(ORDERS)), st.lists(sequences, max_size=12), times)
def test_an_order_is_a_permutation_with_the_preempted_first(name, waiting, now):
    before = list(waiting)
    ordered = ORDERS[name].sort(waiting, now)
    assert waiting == before, "the queue itself was changed"
    assert Counter(map(id, ordered)) == Counter(map(id, waiting))
    preempted = [s for s in ordered if s.output_ids]
    assert ordered[: len(preempted)] == preempted
    assert [s.arrival_s for s in preempted] == sorted(s.arrival_s for s in preempted)
    assert ordered == ORDERS[name].sort(ordered, now), "a second sorting changes nothing"


def test_sjf_counts_what_is_not_cached():
    waiting = [sequence(100, "a"), sequence(50, "b"), sequence(5, "c"), sequence(10, "d", output=1)]
    waiting[0].block_hashes = [bytes([block + 1]) for block in range(99)]
    assert names(order("sjf", 90).sort(waiting, 0.0)) == "dcab"


def test_least_slack_first_and_what_is_too_late_last():
    arrivals = (
        ("a", 10, 9.5),  # 2 - 0.5 - 0.1 left
        ("b", 100, 9.5),  # 2 - 0.5 - 1.0
        ("c", 100, 8.9),  # 2 - 1.1 - 1.0: too late
        ("d", 10, 8.2),  # 2 - 1.8 - 0.1
        ("e", 10, 5.0),  # too late, for longer
    )
    waiting = [sequence(tokens, name, arrival_s=arrival_s) for name, tokens, arrival_s in arrivals]
    assert names(ORDERS["slack"].sort(waiting, 10.0)) == "dbaec"
    assert names(ORDERS["slack"].sort(waiting, 5.0 + PATIENCE * TTFT_S)) == "edcab"


@settings(max_examples=25)
@given(
    victim=st.integers(1, 1000),
    others=st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 32)), min_size=150, max_size=150),
)
def test_nothing_starves_under_slack(victim, others):
    """One is served at a time, whichever is first; the others never stop arriving, faster than they are served."""
    service_s, now, arrivals = 0.25, 0.0, 0.0
    waiting = [sequence(victim, "victim")]
    for tokens, gap in others:
        arrivals += gap / 128
        waiting.append(sequence(tokens, "o", arrival_s=arrivals))
    while waiting[0].request_id == "victim":
        waiting.remove(ORDERS["slack"].sort([s for s in waiting if s.arrival_s <= now], now)[0])
        now += service_s
    assert now <= PATIENCE * TTFT_S + 2 * service_s
