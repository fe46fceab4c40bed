"""The pressure on a stage, now and with another number of instances; at 1 it just keeps the SLO.

The pressure of encode and prefill is the queue's seconds over the SLO's share for it; that of decode is a step's
seconds over the TPOT limit. If ``n`` instances together make ``T`` tokens per second, a sequence shares its batch
with ``B = T / n * step(B)`` others; with ``step(B) = a + b * B`` a step takes ``(a + b) / (1 - T * b / n)``.
Demand does not depend on the number of instances, batches do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, linear_regression, pvariance

from epd_serve.autoscale.instance_load import InstanceLoad
from epd_serve.types import Role, Stage, StageRate

#: Pressure of a stage without an instance.
UNSERVED = 1000.0
#: Growth is measured only of queues above this fraction of their limit.
_NOTICEABLE = 0.25
#: Above this utilisation instances are sometimes late even without a mean queue.
_BUSY = 0.8
_KV_FULL = 0.9
#: Above this fraction of a decode instance's maximum throughput, batches grow without bound.
_UNBOUNDED = 0.95
#: Pressure from which growing batches are extrapolated.
_SOON = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The SLO in seconds; the queue of one stage may take half of ``ttft_s``."""

    ttft_s: float
    tpot_s: float

    @property
    def queue_s(self) -> float:
        return self.ttft_s / 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One stage at one moment, summed over its serving instances.

    Attributes:
        num_busy: instances with work.
        queue_s: seconds of pending work.
        sent: work that arrived since the previous sample: seconds of encoding, sequences to decode.
        tokens_per_s, num_sequences, step_s: decode throughput, sequences and longest step.
    """

    num_instances: int
    num_busy: int
    queue_s: float
    sent: float = 0.0
    tokens_per_s: float = 0.0
    num_sequences: float = 0.0
    step_s: float = 0.0
    kv_used: float = 0.0
    step: StageRate = StageRate(0.02, 1e-3)  # noqa: RUF009 - it is frozen
    output_tokens: float = 128.0


def sample(stage: Stage, instances: Sequence[InstanceLoad], sent: float = 0.0) -> Sample:
    """Sum up the serving instances of the stage; others finish their own pending work."""
    here = [one for one in instances if one.is_serving and stage in one.role.stages]
    waits_s = [one.queue_s.get(stage, 0.0) for one in here]
    queue_s = sum(waits_s)
    if stage is not Stage.DECODE or not here:
        num_busy = sum(wait_s > 0 for wait_s in waits_s)
        return Sample(num_instances=len(here), num_busy=num_busy, queue_s=queue_s, sent=sent)
    busy = [(one.num_decoding, one.step.seconds(one.num_decoding)) for one in here if one.num_decoding > 0]
    return Sample(
        num_instances=len(here),
        num_busy=len(busy),
        queue_s=queue_s,
        sent=sent,
        tokens_per_s=sum(count / seconds for count, seconds in busy),
        num_sequences=sum(count for count, _ in busy),
        step_s=max((seconds for _, seconds in busy), default=0.0),
        kv_used=fmean(one.kv_used for one in here),
        step=here[0].step,
        output_tokens=here[0].output_tokens,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StageLoad:
    """One stage over some seconds.

    Attributes:
        demand: instances that the incoming work keeps busy; for decode, within the TPOT limit.
        growth: seconds added to the queue per second.
        more: sequences added to the batches per second.
    """

    stage: Stage
    limits: Limits
    num_instances: int
    queue_s: float
    demand: float
    growth: float
    more: float
    tokens_per_s: float
    step_s: float
    kv_used: float
    step: StageRate

    @property
    def pressure(self) -> float:
        if not self.num_instances:
            return UNSERVED
        waiting = self.queue_s / self.num_instances / self.limits.queue_s
        return max(waiting, self.step_s / self.limits.tpot_s) if self.stage is Stage.DECODE else waiting

    @property
    def coming(self) -> float:
        """The pressure once growing decode batches reach their final size; else the measured one.

        Decode lags its load by the length of an answer; encode and prefill do not.
        """
        now = self.pressure
        if self.stage is not Stage.DECODE or not self.num_instances or self.more <= 0 or now <= _SOON:
            return now
        return max(now, self._step_s(self.num_instances) / self.limits.tpot_s)

    def predicted(self, capacity: float, ahead_s: float) -> float:
        """Predict the pressure in ``ahead_s`` seconds with ``capacity`` instances and unchanged demand."""
        if capacity <= 0:
            return UNSERVED
        if self.stage is not Stage.DECODE:
            queue_s = max(self.queue_s + (self.demand - capacity) * ahead_s, 0.0)
            crowded = max(self.demand / capacity - _BUSY, 0.0) / (1 - _BUSY)
            return queue_s / capacity / self.limits.queue_s + crowded
        step_s = self._step_s(capacity)
        waiting = 0.0
        if self.queue_s:  # all places are taken: the instances stay busy
            queue_s = max(self.queue_s + (self.num_instances + self.growth - capacity) * ahead_s, 0.0)
            waiting = queue_s / capacity / self.limits.queue_s
        now_s = self._step_s(self.num_instances) if self.num_instances else 0.0
        batches = step_s / now_s if now_s else 1.0
        kv = self.kv_used * self.num_instances / capacity * batches
        return max(step_s / self.limits.tpot_s, waiting) + max(kv - _KV_FULL, 0.0) / (1 - _KV_FULL)

    def _step_s(self, capacity: float) -> float:
        """Return the seconds of a decode step with ``capacity`` instances; 0 without work."""
        if not self.tokens_per_s:
            return 0.0
        part = self.tokens_per_s * self.step.unit_s / capacity
        return self.step.seconds(1) / (1 - min(part, _UNBOUNDED)) * max(part / _UNBOUNDED, 1.0)


def load_of(
    stage: Stage,
    samples: Sequence[tuple[float, Sample]],
    window: Sequence[tuple[float, Sample]],
    limits: Limits,
    *,
    num_recent: int,
    ahead_s: float,
) -> StageLoad:
    """Compute pressure from the latest samples; growth and demand are noisier and use more samples.

    Args:
        samples: timed samples of an unchanged set of instances, newest last.
        window: all samples of the last seconds, with any instances.
    """
    past = [one for _, one in window]
    sent_per_s, error_per_s = _per_s(window)
    every = [one for _, one in samples[-num_recent:]]
    newest = every[-1]
    num = newest.num_instances
    queue_s = fmean(one.queue_s for one in every)
    growth = more = 0.0
    if num and queue_s / num > _NOTICEABLE * limits.queue_s:
        growth = max(_slope([(at_s, one.queue_s) for at_s, one in samples]), 0.0)
    tokens_per_s = max(fmean(one.tokens_per_s for one in past), fmean(one.tokens_per_s for one in every))
    step_s = fmean(one.step_s for one in every)
    if stage is Stage.DECODE:
        if step_s > _NOTICEABLE * limits.tpot_s:
            more = max(_slope([(at_s, one.num_sequences) for at_s, one in samples]), 0.0)
            tokens_per_s *= 1 + more * ahead_s / fmean(one.num_sequences for one in every)
        tokens_per_s = max(tokens_per_s, sent_per_s * newest.output_tokens)
        step = newest.step  # a step may take twice as long as with one sequence if no batch keeps the limit
        longest_s = max(limits.tpot_s, 2 * step.seconds(1))
        most = max((longest_s - step.base_s) / step.unit_s, 1.0) / longest_s if step.unit_s > 0 else 1e9
        demand = tokens_per_s / most
    else:
        demand = max(fmean(one.num_busy for one in past) + growth, sent_per_s + error_per_s)
    return StageLoad(
        stage=stage,
        limits=limits,
        num_instances=num,
        queue_s=queue_s,
        demand=demand,
        growth=growth,
        more=more,
        tokens_per_s=tokens_per_s,
        step_s=step_s,
        kv_used=fmean(one.kv_used for one in every),
        step=newest.step,
    )


def capacities(roles: Sequence[Role], loads: Mapping[Stage, StageLoad]) -> dict[Stage, float]:
    """Return how many instances' capacity these roles give to each stage.

    An instance with several stages is divided by demand, but counts fully for decode, which comes first in every
    step.
    """
    given = dict.fromkeys(loads, 0.0)
    for role in roles:
        stages = [stage for stage in loads if stage in role.stages]
        demand = sum(loads[stage].demand for stage in stages)
        for stage in stages:
            if stage is Stage.DECODE:
                given[stage] += 1.0
            else:
                given[stage] += loads[stage].demand / demand if demand else 1 / len(stages)
    return given


def _per_s(window: Sequence[tuple[float, Sample]]) -> tuple[float, float]:
    """Return the mean incoming work per second and its standard error."""
    sent = [one.sent for _, one in window[1:]]
    if not sent:
        return 0.0, 0.0
    span_s = window[-1][0] - window[0][0]
    return sum(sent) / span_s, sqrt(len(sent) * pvariance(sent)) / span_s


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of the least-squares line; 0 for fewer than two times."""
    times_s, values = zip(*points, strict=True)
    return linear_regression(times_s, values).slope if len(set(times_s)) > 1 else 0.0
