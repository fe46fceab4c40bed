"""Figures of the dashboard, from requests."""

import pytest

from epd_serve.config.sections import SLOConfig
from epd_serve.telemetry.span import join_trace
from proxy.observe.figures import NUM_SLOTS, Figures
from proxy.observe.record import RequestRecord


def record(second, *, status=200, ttft_s=0.1):
    """A request that ended then; of a streamed answer where there is a ``ttft_s``."""
    made = RequestRecord("chat", join_trace(), "r", second - 1)
    made.ttft_s, made.end_s = ttft_s, second
    made.status, made.error = status, "timeout" if status != 200 else ""
    return made


def test_figures_of_the_last_minute():
    figures = Figures(SLOConfig(ttft_ms=200))
    for second in range(1000, 1200):
        figures.put(record(second, ttft_s=0.1 if second % 4 else 0.3))
    figures.put(record(1199, status=504, ttft_s=None))
    shown = figures.window(1200.0, NUM_SLOTS)
    assert shown["num_requests"] == NUM_SLOTS + 1
    assert shown["reasons"] == {"504 timeout": 1} and shown["num_failed"] == 1
    assert shown["attainment"] == pytest.approx(0.75, abs=0.02)
    assert shown["ttft_ms"]["p50"] == pytest.approx(100) and shown["ttft_ms"]["p99"] == pytest.approx(300)
    assert figures.window(1200.0, 10)["num_requests"] == 11
    rates = figures.series(1200.0)["requests"]
    assert rates == [1] * (NUM_SLOTS - 1) + [2]
