"""SLO attainment of a simulation."""

from __future__ import annotations

from epd_serve.bench.summary import wilson
from epd_serve.bench.types import Share
from epd_serve.sim.gateway import Job
from epd_serve.sim.simulator import Outcome


def attains(job: Job, ttft_s: float | None, tpot_s: float | None) -> bool:
    """Return whether a request succeeded within both limits."""
    if job.failure or job.first_token_s is None or job.last_token_s is None or job.finish_s is None:
        return False
    if ttft_s is not None and job.first_token_s - job.sent_s > ttft_s:
        return False
    if tpot_s is None or job.num_output < 2:
        return True
    return (job.last_token_s - job.first_token_s) / (job.num_output - 1) <= tpot_s


def attainment(outcome: Outcome, ttft_s: float | None, tpot_s: float | None) -> Share:
    """Return the attainment; requests unfinished in a stopped run count as missed."""
    return wilson(sum(attains(job, ttft_s, tpot_s) for job in outcome.jobs), len(outcome.jobs))
