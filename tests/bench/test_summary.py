"""Figures from records: percentiles, intervals, windows, attainment and warnings."""

from __future__ import annotations

import math
from typing import Any

import pytest
from bench_runs import failed
from hypothesis import given
from hypothesis import strategies as st
from load_tester import settings

from epd_serve.bench.statistics import (
    distribution,
    is_growing,
    least_number,
    load_curve,
    mean_concurrency,
    percentile,
    wilson,
)
from epd_serve.bench.summary import summarise
from epd_serve.bench.types import ClientLoad, Record

URL = "http://127.0.0.1:1"


def record(index: int, at_s: float, *, ttft_s: float = 0.1, gap_s: float = 0.01, **more: Any) -> Record:
    """An answer of five tokens."""
    times = [at_s + ttft_s + gap_s * token for token in range(5)]
    found: dict[str, Any] = {
        "workload": "w",
        "modality": "text",
        "scheduled_s": at_s,
        "sent_s": at_s,
        "first_chunk_s": times[0],
        "first_token_s": times[0],
        "token_times_s": times,
        "last_event_s": times[-1],
        "finish_s": times[-1],
        "num_prompt_tokens": 7,
        "num_output_tokens": 5,
        "has_usage": True,
    }
    return Record(index=index, **{**found, **more})


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], q: float) -> None:
    numpy = pytest.importorskip("numpy")
    assert percentile(sorted(values), q) == pytest.approx(numpy.percentile(values, q), rel=1e-9, abs=1e-6)
    one = distribution(values)
    assert one is not None
    assert one.std == pytest.approx(numpy.std(values), rel=1e-6, abs=1e-6)


def test_wilson_is_the_textbooks() -> None:
    """Newcombe 1998, table I, method 3: 81 of 263, 15 of 148, 0 of 20, 1 of 29."""
    for part, whole, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605)):
        found = wilson(part, whole)
        assert (round(found.low, 4), round(found.high, 4)) == (low, high)
    assert (wilson(0, 20).low, round(wilson(0, 20).high, 4)) == (0.0, 0.1611)
    assert (round(wilson(1, 29).low, 4), round(wilson(1, 29).high, 4)) == (0.0061, 0.1718)
    assert wilson(20, 20).high == 1.0
    assert wilson(0, 0).high == 1.0


def test_how_many_values_a_percentile_needs() -> None:
    assert [least_number(q) for q in (50, 90, 95, 99)] == [10, 50, 100, 500]


def test_failures_are_in_the_denominator_and_the_schedule_decides() -> None:
    wanted = settings(URL, rate=10.0, num_requests=4)
    late = record(2, 0.2, ttft_s=0.1, scheduled_s=-2.0)  # a fast answer, sent too late
    slow = record(3, 0.3, gap_s=0.06)
    records = [record(0, 0.0), failed(1, 0.1), late, slow]
    total = summarise(wanted, records).total
    assert (total.attainment.part, total.attainment.whole) == (1, 4)
    assert total.ttft_attainment.part == 2
    assert total.tpot_attainment.part == 2
    assert total.num_failed == 1
    assert total.failures == {"connect": 1}
    assert total.figures["ttft"].max == pytest.approx(0.1)
    assert total.figures["ttft_scheduled"].max == pytest.approx(2.3)
    assert total.figures["tpot"].max == pytest.approx(0.06)
    assert total.duration_s == pytest.approx(2.0 + 0.3 + 0.1 + 0.24)
    assert total.output_token_throughput == pytest.approx(15 / total.duration_s)
    assert total.effective_throughput == pytest.approx(5 / total.duration_s)
    assert total.goodput == pytest.approx(1 / total.duration_s)


def test_modalities_are_apart() -> None:
    records = [record(index, index / 10, modality="image" if index % 2 else "text") for index in range(4)]
    found = summarise(settings(URL, rate=10.0, num_devices=2), records)
    assert sorted(found.by_modality) == ["image", "text"]
    assert found.by_modality["image"].num_requests == 2
    assert found.total.goodput_per_device == pytest.approx(found.total.goodput / 2)


def test_a_backlog_that_grows_is_said() -> None:
    """A server of five a second, asked ten times a second."""
    records = [record(index, index / 10, ttft_s=0.1 + index / 10) for index in range(100)]
    curve = load_curve(records)
    assert is_growing(curve, 0.0, 9.9)
    found = summarise(settings(URL, rate=10.0, num_requests=100), records)
    assert any("does not keep up with this rate" in warning for warning in found.warnings)
    steady = [record(index, index / 10) for index in range(100)]
    assert not is_growing(load_curve(steady), 0.0, 9.9)


def test_what_the_tester_says_of_itself() -> None:
    records = [record(index, index / 50, scheduled_s=index / 100) for index in range(100)]
    tester = ClientLoad(wall_s=2.0, cpu_s=1.9, loop_lag_p99_s=0.03, loop_lag_max_s=0.03)
    warnings = " ".join(summarise(settings(URL, rate=100.0, num_requests=100), records, tester).warnings)
    assert "The rate fell short: 50.00 of 100.00 requests/s" in warnings
    assert "The tester was late by" in warnings
    assert "95% of a core" in warnings
    assert "100 answers are too few for p99 (needs 500)" in warnings


def test_a_run_without_records_is_an_error() -> None:
    with pytest.raises(ValueError, match="no finished request"):
        summarise(settings(URL), [])


def test_the_mean_concurrency_is_an_area() -> None:
    curve = load_curve([record(0, 0.0, ttft_s=1.96), record(1, 1.0, ttft_s=0.96)])
    assert mean_concurrency(curve, 0.0, 2.0) == pytest.approx(1.5)
    assert mean_concurrency(curve, 1.5, 2.0) == pytest.approx(2.0)
    assert mean_concurrency([], 0.0, 1.0) == 0.0
    assert math.isfinite(mean_concurrency(curve, 1.0, 1.0))
