"""Whether a simulated deployment keeps up with its requests: the number of them under way does not grow."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from statistics import fmean

from epd_serve.sim.gateway import Job
from epd_serve.sim.simulator import Outcome


def under_way(jobs: Sequence[Job]) -> list[int]:
    """For each request, the number of earlier ones that had not ended when it arrived."""
    ends = sorted(math.inf if job.finish_s is None else job.finish_s for job in jobs)
    return [number - bisect_left(ends, job.sent_s) for number, job in enumerate(jobs)]


def is_steady(jobs: Sequence[Job]) -> bool:
    """Whether the last third of the requests met no more others than the first third did, but for chance. Requests
    that came before the deployment was full, within 1.5 times the mean time of a request, do not count.

    The number of independent requests under way that is ``n`` on average has the standard deviation √n at any
    moment; twice that is taken for chance. A run of which nothing is left to compare passes.

    Args:
        jobs: jobs of a run that was not given up, by arrival.
    """
    stays = [job.finish_s - job.sent_s for job in jobs if job.finish_s is not None]
    if not stays:
        return False
    full = bisect_left([job.sent_s for job in jobs], jobs[0].sent_s + 1.5 * fmean(stays))
    numbers = under_way(jobs)[full:]
    third = len(numbers) // 3
    if not third:
        return True
    before, behind = fmean(numbers[:third]), fmean(numbers[-third:])
    return behind <= before + 2 * math.sqrt(before) + 1


def served_per_s(outcome: Outcome) -> float:
    """Requests that ended in a second, from a quarter of the run on to its last arrival or its end."""
    until = min(outcome.seconds, outcome.jobs[-1].sent_s)
    since = until / 4
    ended = sum(1 for job in outcome.jobs if job.finish_s is not None and since < job.finish_s <= until)
    return ended / (until - since) if until > since else 0.0
