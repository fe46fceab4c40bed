"""Chunks that take about half a second, on any device, and decodes beside them."""

from __future__ import annotations

import pytest

from epd_serve.sched.step_cost import MIN_CHUNK, TARGET_S, ChunkPace


def take(pace: ChunkPace, num_tokens: int) -> int:
    """Take a chunk of a step with a decode."""
    meter = pace.meter()
    meter.take_decode(100)
    return meter.take_chunk(0, num_tokens)


def prefill(pace: ChunkPace, num_tokens: int, token_s: float, base_s: float = 0.0) -> list[float]:
    """Prefill a prompt beside a decode; return the seconds of its steps."""
    steps: list[float] = []
    while num_tokens:
        count = take(pace, min(num_tokens, 8192))
        num_tokens -= count
        steps.append(base_s + count * token_s)
        pace.observe(count, steps[-1])
    return steps


@pytest.mark.parametrize("token_s", [0.05, 0.003, 0.0003])
def test_a_long_prompt_is_cut_into_steps_of_well_under_a_second(token_s: float) -> None:
    steps = prefill(ChunkPace(256, 4096), 5016, token_s)
    later = steps[3:]
    assert later and max(later) <= max(TARGET_S, MIN_CHUNK * token_s) + 1e-9
    assert sum(later) / len(later) > TARGET_S / 4


def test_without_decodes_a_step_is_as_long_as_it_may_be_however_slow() -> None:
    pace = ChunkPace(256, 1024)
    for _ in range(4):
        count = pace.meter().take_chunk(0, 5016)
        assert count == 1024
        pace.observe(count, 20.0)
    assert take(pace, 5016) == int(1024 * TARGET_S / 20), "they tell how long a chunk beside decodes may be"


def test_a_step_that_compiles_costs_a_few_small_chunks() -> None:
    pace = ChunkPace(2048, 4096)
    pace.observe(2048, 60.0)
    assert MIN_CHUNK <= pace.num_tokens < 2048
    prefill(pace, 10_000, 0.0001)
    assert pace.num_tokens >= 2048


def test_short_prompts_make_no_chunk_smaller() -> None:
    pace = ChunkPace(2048, 4096)
    for _ in range(100):
        pace.observe(10, 0.05)
    assert pace.num_tokens == 2048


def test_decodes_beside_a_prompt_leave_it_a_part_of_the_step() -> None:
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
