"""A simulation in the load tester's own records, and its SLO attainment."""

from __future__ import annotations

from epd_serve.bench.statistics import wilson
from epd_serve.bench.types import Failure, Record, Share
from epd_serve.sim.gateway import Job
from epd_serve.sim.simulator import Outcome


def records_of(outcome: Outcome) -> list[Record]:
    """One for each request. Without ``gaps`` in the simulation, token times are the first and the last."""
    records: list[Record] = []
    for job in outcome.jobs:
        failure = Failure.HTTP_STATUS if job.failure else Failure.TIMEOUT if job.finish_s is None else None
        times = list(job.token_times_s)
        if len(times) < job.num_output and job.last_token_s is not None and not job.failure:
            times = [*times[:1], job.last_token_s] if job.num_output > 1 else times[:1]
        records.append(
            Record(
                index=job.number,
                workload="simulated",
                modality=job.request.modality,
                scheduled_s=job.sent_s,
                sent_s=job.sent_s,
                first_chunk_s=job.first_token_s,
                first_token_s=job.first_token_s,
                token_times_s=times,
                finish_s=outcome.seconds if job.finish_s is None else job.finish_s,
                num_prompt_tokens=job.num_tokens,
                num_output_tokens=job.num_output,
                has_usage=True,
                finish_reason=None if job.failure else "length",
                failure=failure,
                detail=job.failure,
            )
        )
    return records


def attains(job: Job, ttft_s: float | None, tpot_s: float | None) -> bool:
    """Whether a request succeeded within both limits."""
    if job.failure or job.first_token_s is None or job.last_token_s is None or job.finish_s is None:
        return False
    if ttft_s is not None and job.first_token_s - job.sent_s > ttft_s:
        return False
    if tpot_s is None or job.num_output < 2:
        return True
    return (job.last_token_s - job.first_token_s) / (job.num_output - 1) <= tpot_s


def attainment(outcome: Outcome, ttft_s: float | None, tpot_s: float | None) -> Share:
    """With its Wilson interval; what had not ended when the run was given up counts as missed."""
    return wilson(sum(attains(job, ttft_s, tpot_s) for job in outcome.jobs), len(outcome.jobs))
