import math
from itertools import accumulate
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sequences import sequence as new_sequence

from epd_serve.sched.schedule import Budget, ScheduleOutput, schedule
from epd_serve.sched.step_cost import (
    MIN_CHUNK,
    PREFILL_SHARE,
    StepCost,
    StepPace,
    StepWork,
    latency_limit_s,
    search_budget,
    work_done,
)
from epd_serve.types import Role

COST = StepCost(base_s=0.01, token_s=1e-4, sequence_s=5e-4, context_s=1e-6, pair_s=2e-7)


@pytest.mark.parametrize(
    ("role", "limit_s"), [("E", 1), ("P", 1), ("EP", 1), ("D", 0.05), ("ED", 0.05), ("PD", 0.05), ("EPD", 0.05)]
)
def test_the_limit_of_a_role(role, limit_s):
    assert latency_limit_s(Role.parse(role), ttft_s=2, tpot_s=0.05) == limit_s
    assert latency_limit_s(Role.parse(role), ttft_s=None, tpot_s=None) is None


@given(
    steps=st.lists(st.sampled_from((0.0, 0.0, 0.25, 1.0, 3.0)), min_size=1, max_size=200),
    limit_s=st.floats(0, 60),
)
def test_the_search_finds_the_largest_feasible_size(steps, limit_s):
    """On every function that grows, with plateaus and jumps: exactly the last size within the limit."""
    times = dict(enumerate(accumulate(steps), start=1))
    measured = []

    def measure(size):
        measured.append(size)
        return times[size]

    size, seconds = search_budget(measure, limit_s, len(steps))
    feasible = [size for size in range(1, len(steps) + 1) if times[size] <= limit_s]
    assert size == max(feasible, default=1)
    assert seconds == times[size]
    assert len(measured) == len(set(measured)) <= 2 * math.log2(len(steps)) + 3, "logarithmic, nothing twice"
    assert max(measured) <= 2 * size, "nothing much larger was tried"


@given(seconds=st.floats(0, 1), start=st.integers(0, 5000))
def test_the_longest_chunk_is_the_inverse_of_its_cost(seconds, start):
    count = int(COST.tokens_within(seconds, start))
    assert COST.chunk_s(start, count + 1) > seconds - 1e-9
    assert count == 0 or COST.chunk_s(start, count) <= seconds + 1e-9


def sequence(prompt, *, computed=0, output=0, **fields):
    computed = prompt + output - 1 if output else computed
    return new_sequence(prompt, computed=computed, output=output, **fields)


def step(running, waiting, pace):
    tables = Mock(num_free=1000, num_needed=Mock(return_value=1))
    return schedule(running, waiting, Budget(max_num_tokens=4096, max_num_seqs=64, pace=pace), tables, Mock())


def work(output):
    chunks = ((s.num_computed, count) for s, count in output.prefills)
    return StepWork.of((s.num_tokens for s in output.decodes), chunks)


@settings(max_examples=60)
@given(
    decodes=st.lists(st.integers(1, 2000), max_size=30),
    chunk=st.tuples(st.integers(0, 2000), st.integers(1, 2000)),
    prompts=st.lists(st.integers(1, 2000), max_size=5),
    limit_s=st.floats(0.001, 1),
)
def test_a_step_is_predicted_to_end_within_its_limit(decodes, chunk, prompts, limit_s):
    running = [sequence(context, output=1) for context in decodes] + [sequence(sum(chunk), computed=chunk[0])]
    output = step(running, [sequence(prompt) for prompt in prompts], StepPace(COST, limit_s))
    assert output.decodes == running[:-1], "decodes are never left out"
    assert output.prefills, "a prefill goes on in every step"
    least = COST.step_s(work(ScheduleOutput(decodes=output.decodes)))
    allowed = max(limit_s, least + PREFILL_SHARE * limit_s)
    seconds = COST.step_s(work(output))
    first, count = output.prefills[0]
    assert seconds <= allowed + 1e-9 or (len(output.prefills) == 1 and count <= MIN_CHUNK)
    if count < first.num_uncomputed and len(output.prefills) == 1:
        more_s = COST.chunk_s(first.num_computed, count + 1) - COST.chunk_s(first.num_computed, count)
        assert seconds + more_s > allowed - 1e-9


@given(
    decodes=st.lists(st.integers(1, 2000), max_size=30),
    prompts=st.lists(st.integers(1, 50), max_size=30),
    limit_s=st.floats(0.011, 0.2),
)
def test_no_more_are_admitted_than_can_decode_within_the_limit(decodes, prompts, limit_s):
    running = [sequence(context, output=1) for context in decodes]
    output = step(running, [sequence(prompt) for prompt in prompts], StepPace(COST, limit_s))
    together = StepWork.of([s.num_tokens for s in (*running, *output.admitted)], ())
    if len(output.admitted) + len(running) > 1 and output.admitted:
        assert COST.step_s(together) <= (1 - PREFILL_SHARE) * limit_s
    assert running or not prompts or output.admitted, "one that is alone has room"


def test_what_another_instance_decodes_needs_no_room():
    prompts = [sequence(20, hand_off=True) for _ in range(12)]
    assert len(step([], prompts, StepPace(COST, 0.06)).admitted) == 12
    assert len(step([], [sequence(20) for _ in range(60)], StepPace(COST, 0.02)).admitted) < 12


def test_the_pace_follows_observed_times_and_forgets_an_outlier():
    pace = StepPace(COST, 0.1)
    ran = StepWork.of([100] * 4, [(0, 200)])
    chunk = step([], [sequence(3000)], pace).num_tokens
    for _ in range(60):
        pace.observe(ran, 2 * COST.step_s(ran))
    assert 2.0 <= pace.correction < 2.05
    assert step([], [sequence(3000)], pace).num_tokens < 0.6 * chunk
    pace.observe(ran, 1000.0)
    assert pace.correction < 3.2
    for _ in range(60):
        pace.observe(ran, COST.step_s(ran))
    assert step([], [sequence(3000)], pace).num_tokens > 0.9 * chunk


def test_the_work_of_a_step_that_ended_is_what_was_scheduled():
    running = [sequence(50, output=3), sequence(70, output=1), sequence(400, computed=30)]
    output = step(running, [sequence(20)], StepPace(COST, 0.05))
    before = work(output)
    for s in output.decodes:
        s.num_computed += 1
        s.output_ids.append(1)
    for s, count in output.prefills:
        s.num_computed += count
    assert work_done(output.decodes, output.prefills) == before
