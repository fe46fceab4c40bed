import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.cost.stages import NONE, StageCosts, Work
from epd_serve.types import StageRate

amounts = st.floats(0, 1e9)
works = st.builds(Work, num_pixels=amounts, num_tokens=amounts, num_sequences=amounts, num_kv_tokens=amounts)


@given(works, works)
def test_work_taken_away_again_is_gone_and_never_less_than_nothing(one, other):
    assert one + NONE == one
    assert NONE - one == NONE
    rest = (one + other) - other
    assert rest.num_tokens == pytest.approx(one.num_tokens, abs=1e-3)


def test_work_is_done_in_batches():
    costs = StageCosts(
        encode=StageRate(0.5, 0.001), prefill=StageRate(0.1, 0.01), max_batch_pixels=1000, max_batch_tokens=10
    )
    assert costs.encode_s(0) == costs.prefill_s(0) == 0
    assert costs.encode_s(1000) == pytest.approx(1.5)
    assert costs.encode_s(1001) == pytest.approx(2.001)
    assert costs.prefill_s(25) == pytest.approx(0.3 + 0.25)


@given(st.integers(1, 100), st.integers(0, 100))
def test_a_sequence_costs_more_the_more_there_are(num_sequences, num_active):
    costs = StageCosts(decode=StageRate(0.02, 0.0))
    one, more = costs.decode_s(num_sequences, num_active), costs.decode_s(num_sequences, num_active + 1)
    assert 0 < one < more
    assert costs.decode_s(num_sequences, num_active, 1) < one
