"""Figures from records: percentiles, intervals, windows, attainment and warnings."""

from __future__ import annotations

import pytest
from bench_runs import failed, good
from hypothesis import given
from hypothesis import strategies as st
from load_tester import settings

from epd_serve.bench.summary import distribution, percentile, summarise

URL = "http://127.0.0.1:1"


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), st.floats(0, 100))
def test_percentiles_equal_numpys(values: list[float], q: float) -> None:
    numpy = pytest.importorskip("numpy")
    assert percentile(sorted(values), q) == pytest.approx(numpy.percentile(values, q), rel=1e-9, abs=1e-6)
    one = distribution(values)
    assert one is not None
    assert one.std == pytest.approx(numpy.std(values), rel=1e-6, abs=1e-6)


def test_failures_are_in_the_denominator_and_the_schedule_decides() -> None:
    wanted = settings(URL, rate=10.0, num_requests=4)
    late = good(2, 0.2, scheduled_s=-2.0)  # a fast answer, sent too late
    slow = good(3, 0.3, gap_s=0.06)
    records = [good(0, 0.0), failed(1, 0.1), late, slow]
    total = summarise(wanted, records).total
    assert (total.attainment.part, total.attainment.whole) == (1, 4)
    assert total.ttft_attainment.part == 2
    assert total.tpot_attainment.part == 2
    assert total.num_failed == 1
    assert total.failures == {"connect": 1}
    assert total.figures["ttft"].max == pytest.approx(0.1)
    assert total.figures["ttft_scheduled"].max == pytest.approx(2.301)
    assert total.figures["tpot"].max == pytest.approx(0.06)
    assert total.duration_s == pytest.approx(2.0 + 0.301 + 0.1 + 0.24)
    assert total.output_token_throughput == pytest.approx(15 / total.duration_s)
    assert total.effective_throughput == pytest.approx(5 / total.duration_s)
    assert total.goodput == pytest.approx(1 / total.duration_s)
