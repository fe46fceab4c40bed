"""Chunks that take about half a second, on any device, and decodes beside them."""

import pytest

from epd_serve.sched.step_cost import MIN_CHUNK, TARGET_S, ChunkPace


def take(pace, num_tokens):
    """Take a chunk of a step with a decode."""
    meter = pace.meter()
    meter.take_decode(100)
    return meter.take_chunk(0, num_tokens)


def prefill(pace, num_tokens, token_s):
    """Prefill a prompt beside a decode; return the seconds of its steps."""
    steps = []
    while num_tokens:
        count = take(pace, min(num_tokens, 8192))
        num_tokens -= count
        steps.append(count * token_s)
        pace.observe(count, steps[-1])
    return steps


@pytest.mark.parametrize("token_s", [0.05, 0.003, 0.0003])
def test_a_long_prompt_is_cut_into_steps_of_well_under_a_second(token_s):
    later = prefill(ChunkPace(256, 4096), 5016, token_s)[3:]
    assert later and max(later) <= max(TARGET_S, MIN_CHUNK * token_s) + 1e-9
    assert sum(later) / len(later) > TARGET_S / 4


def test_without_decodes_a_step_is_as_long_as_it_may_be_however_slow():
    pace = ChunkPace(256, 1024)
    for _ in range(4):
        assert pace.meter().take_chunk(0, 5016) == 1024
        pace.observe(1024, 20.0)
    assert take(pace, 5016) == int(1024 * TARGET_S / 20), "they tell how long a chunk beside decodes may be"


def test_neither_a_step_that_compiles_nor_short_prompts_make_chunks_small_for_long():
    pace = ChunkPace(2048, 4096)
    for _ in range(100):
        pace.observe(10, 0.05)
    assert pace.num_tokens == 2048
    pace.observe(2048, 60.0)
    assert MIN_CHUNK <= pace.num_tokens < 2048
    prefill(pace, 10_000, 0.0001)
    assert pace.num_tokens >= 2048


def test_decodes_beside_a_prompt_leave_it_a_part_of_the_step():
    pace = ChunkPace(256, 4096)
    pace.observe(0, 0.4)
    for _ in range(10):
        count = take(pace, 5000)
        pace.observe(count, 0.4 + count * 0.002)
    assert pace.num_tokens * 0.002 == pytest.approx(TARGET_S - 0.4, rel=0.2)
    pace.observe(0, 5.0)  # decodes alone take longer than a step should
    for _ in range(10):
        pace.observe(take(pace, 5000), 5.1)
    assert pace.num_tokens >= MIN_CHUNK
