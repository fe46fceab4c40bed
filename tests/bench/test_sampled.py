"""Counters of a server over a run, also of one that was started again in between."""

from __future__ import annotations

from epd_serve.bench.server import parse_metrics, sampled
from epd_serve.bench.types import Sample


def sample(phase: str, hits: float, lookups: float, cpu_s: float) -> Sample:
    return Sample(
        at_s=0.0,
        phase=phase,
        metrics={'vllm:mm_cache_hits_total{a="1"}': hits, 'vllm:mm_cache_queries_total{a="1"}': lookups},
        devices={"cpu": {"cpu_s:e0": cpu_s}},
    )


def test_what_grew_counts_and_the_gap_before_a_resumption_does_not() -> None:
    found = sampled([sample("before", 5, 10, 1), sample("during", 8, 20, 3), sample("before", 90, 99, 7)])
    assert (found.cache_hits["media"].part, found.cache_hits["media"].whole) == (3, 10)
    assert found.cpu_s == {"e0": 2.0}


def test_counters_of_a_server_that_was_started_again_begin_at_0() -> None:
    found = sampled(
        [
            sample("before", 8, 10, 50),
            sample("during", 9, 12, 60),
            sample("before", 0, 0, 5),  # another process, behind --resume
            sample("after", 2, 50, 7),
        ]
    )
    assert (found.cache_hits["media"].part, found.cache_hits["media"].whole) == (3, 52)
    assert found.cpu_s == {"e0": 12.0}
    in_mid_run = sampled([sample("before", 8, 10, 50), sample("after", 2, 50, 3)])
    assert (in_mid_run.cache_hits["media"].part, in_mid_run.cache_hits["media"].whole) == (2, 40)
    assert in_mid_run.cpu_s == {"e0": 3.0}


def test_figures_that_json_does_not_have_are_left_out() -> None:
    assert parse_metrics(b"vllm:a 1\nvllm:b NaN\nvllm:c +Inf\n") == {"vllm:a": 1.0}
