"""Demand is what comes, not whom a look finds busy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.autoscale.pressure import Limits, Sample, StageLoad, load_of
from epd_serve.types import Stage, StageRate

LIMITS = Limits(ttft_s=2.0, tpot_s=0.05)
STEP = StageRate(0.02, 0.001)


def load(stage: Stage, samples: list[Sample], *, every_s: float = 1.0, ahead_s: float = 3.0) -> StageLoad:
    window = [(number * every_s, one) for number, one in enumerate(samples)]
    return load_of(stage, window, window, LIMITS, num_recent=3, ahead_s=ahead_s)


@given(st.lists(st.floats(0, 5), min_size=2, max_size=40), st.floats(0.25, 2.0))
def test_encode_demand_includes_bursts(sent: list[float], every_s: float) -> None:
    samples = [Sample(num_instances=3, num_busy=0, queue_s=0.0, sent=one) for one in sent]
    mean = sum(sent[1:]) / (len(sent) - 1) / every_s
    demand = load(Stage.ENCODE, samples, every_s=every_s).demand
    assert demand >= mean * (1 - 1e-9)
    if max(sent[1:]) == min(sent[1:]):
        assert demand == pytest.approx(mean)


def decodes(nums: range, num_instances: int, output_tokens: float) -> list[Sample]:
    """Batches that grow as three sequences a second come and none ends."""
    return [
        Sample(
            num_instances=num_instances,
            num_busy=num_instances,
            queue_s=0.0,
            sent=3.0,
            num_sequences=float(num),
            tokens_per_s=num / STEP.seconds(num / num_instances),
            step_s=STEP.seconds(num / num_instances),
            step=STEP,
            output_tokens=output_tokens,
        )
        for num in nums
    ]


def test_new_answers_are_not_counted_twice() -> None:
    """Three a second of 500 tokens: batches that grow are on their way to 1500 tokens a second."""
    assert 1500 <= load(Stage.DECODE, decodes(range(12, 42, 3), 5, 500.0)).tokens_per_s < 1700


def test_growing_batches_are_foreseen_where_answers_are_longer_than_before() -> None:
    """No long answer has ended, so that nobody knows how long they are."""
    samples = decodes(range(10, 40, 3), 2, 25.0)
    found = load(Stage.DECODE, samples)
    assert found.tokens_per_s > samples[-1].tokens_per_s
    assert found.coming > found.pressure
