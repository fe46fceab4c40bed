"""How a stage is timed: behind its like, as it runs where it is used."""

from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.worker.profile import StepShape, median_s


class Stage:
    """Takes 9 ms its first twenty times and 6 ms from then on."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_runs = 0

    def run(self) -> None:
        self.num_runs += 1
        self.now += 0.009 if self.num_runs <= 20 else 0.006


def test_what_is_cold_at_first_is_measured_once_it_is_warm() -> None:
    stage = Stage()
    assert median_s(stage.run, lambda: stage.now) == pytest.approx(0.009)
    stage = Stage()
    assert median_s(stage.run, lambda: stage.now, least_s=0.2) == pytest.approx(0.006)
    assert 0.4 <= stage.now < 0.42, "so long for warming and again for measuring"


def test_what_takes_long_is_run_a_few_times() -> None:
    stage = Stage()
    median_s(stage.run, lambda: stage.now, least_s=0.001)
    assert stage.num_runs == 4


@given(st.integers(1, 32), st.integers(32, 1024), st.floats(0, 0.9))
def test_contexts_of_decodes_lie_around_their_mean(num_decodes: int, context: int, spread: float) -> None:
    contexts = StepShape(num_decodes=num_decodes, context=context, spread=spread).contexts
    assert len(contexts) == num_decodes and fmean(contexts) == pytest.approx(context, abs=0.5)
    assert contexts == sorted(contexts, reverse=True)
    assert (1 - spread) * context - 1 < contexts[-1] <= contexts[0] < (1 + spread) * context + 1


def test_a_shape_is_named_and_counted_by_its_contexts() -> None:
    shape = StepShape(num_decodes=4, context=256, spread=0.5, chunks=((0, 64),))
    assert shape.contexts == [352, 288, 224, 160]
    assert str(shape) == "4x256~0.5 0+64"
    assert shape.num_blocks(16) == 22 + 18 + 14 + 10 + 4
    assert shape.work.decode_context == 1024 and shape.work.num_tokens == 4 + 64
