"""The pressure on a stage, now and with another number of instances; at 1 it just keeps the SLO.

Encode and prefill queue: their pressure is the queue's seconds over what the SLO leaves for it. Decode shares its
steps: its pressure is a step's seconds over the limit between two tokens. With ``n`` instances that make ``T``
tokens a second together, a batch has ``B = T / n * step(B)`` sequences besides one's own, so that with ``step(B) =
a + b * B`` a step takes ``(a + b) / (1 - T * b / n)``; demand stays when instances come and go, batches do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, pvariance

from epd_serve.autoscale.instance_load import InstanceLoad
from epd_serve.types import Role, Stage, StageRate

#: Of a stage without an instance.
UNSERVED = 1000.0
#: A queue below this part of its limit says nothing about its growth.
_NOTICEABLE = 0.25
#: Busier instances than this are late now and then, although there is no queue on average.
_BUSY = 0.8
_KV_FULL = 0.9
#: Beyond this part of what a decode instance could ever do, batches grow without end.
_ENDLESS = 0.95
#: Of what the SLO allows, from where on growing batches are looked ahead of.
_SOON = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The SLO: seconds to the first token, and between two of them.

    Attributes:
        share: part of ``ttft_s`` that the queue of one stage may take.
    """

    ttft_s: float
    tpot_s: float
    share: float = 0.5

    @property
    def queue_s(self) -> float:
        return self.share * self.ttft_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One stage at one moment, summed over its serving instances.

    Attributes:
        num_busy: instances that had work. queue_s: seconds of it.
        sent: work that came since the sample before: seconds of encoding, sequences to decode.
        tokens_per_s, num_sequences: of decoding; step_s: the longest of its steps.
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
    """Sum up the serving instances that have the stage. The others' pending work is theirs to finish."""
    here = [one for one in instances if one.is_serving and stage in one.role.stages]
    queue_s = sum(one.waits(stage) for one in here)
    if stage is not Stage.DECODE or not here:
        num_busy = sum(one.waits(stage) > 0 for one in here)
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
        num_instances: instances that served it.
        demand: instances that the incoming work would keep busy; for decode, within the limit between tokens.
        growth: seconds of queue that each second adds.
        more: sequences that each second adds to the batches.
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
        """The pressure as measured."""
        if not self.num_instances:
            return UNSERVED
        waiting = self.queue_s / self.num_instances / self.limits.queue_s
        return max(waiting, self.step_s / self.limits.tpot_s) if self.stage is Stage.DECODE else waiting

    @property
    def coming(self) -> float:
        """The pressure once batches that grow are as large as their rate makes them; else as measured.

        Decode lags behind its load by the length of an answer; encode and prefill do not.
        """
        now = self.pressure
        if self.stage is not Stage.DECODE or not self.num_instances or self.more <= 0 or now <= _SOON:
            return now
        return max(now, self._step_s(self.num_instances) / self.limits.tpot_s)

    def predicted(self, capacity: float, ahead_s: float) -> float:
        """The pressure ``ahead_s`` from now, if ``capacity`` instances serve the stage and as much work comes."""
        if capacity <= 0:
            return UNSERVED
        if self.stage is not Stage.DECODE:
            queue_s = max(self.queue_s + (self.demand - capacity) * ahead_s, 0.0)
            crowded = max(self.demand / capacity - _BUSY, 0.0) / (1 - _BUSY)
            return queue_s / capacity / self.limits.queue_s + crowded
        step_s = self._step_s(capacity)
        waiting = 0.0
        if self.queue_s:  # every place is taken: its instances are busy without end
            queue_s = max(self.queue_s + (self.num_instances + self.growth - capacity) * ahead_s, 0.0)
            waiting = queue_s / capacity / self.limits.queue_s
        now_s = self._step_s(self.num_instances) if self.num_instances else 0.0
        batches = step_s / now_s if now_s else 1.0
        kv = self.kv_used * self.num_instances / capacity * batches
        return max(step_s / self.limits.tpot_s, waiting) + max(kv - _KV_FULL, 0.0) / (1 - _KV_FULL)

    def _step_s(self, capacity: float) -> float:
        """Seconds of a decode step with the batches that ``capacity`` instances would have; 0 without work."""
        if not self.tokens_per_s:
            return 0.0
        part = self.tokens_per_s * self.step.unit_s / capacity
        return self.step.seconds(1) / (1 - min(part, _ENDLESS)) * max(part / _ENDLESS, 1.0)


def load_of(
    stage: Stage,
    samples: Sequence[tuple[float, Sample]],
    window: Sequence[tuple[float, Sample]],
    limits: Limits,
    *,
    num_recent: int,
    ahead_s: float,
) -> StageLoad:
    """Take the pressure from the last few samples, and growth and demand, which vary more by chance, from more.

    Args:
        samples: with their times, all of the same instances, the newest last.
        window: all samples of some seconds, whatever instances there were.
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
        demand = tokens_per_s / _most_tokens_per_s(newest.step, limits.tpot_s)
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
    """The capacity that instances of these roles give to each stage, in instances.

    An instance with several stages divides itself by demand, except that it gives decode a whole instance: decodes
    come first in every step.
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


def _most_tokens_per_s(step: StageRate, tpot_s: float) -> float:
    """Tokens a second of one instance within the limit.

    Where no batch keeps the limit, those of a batch whose step takes twice as long as one sequence's.
    """
    longest = max(tpot_s, 2 * step.seconds(1))
    return max((longest - step.base_s) / step.unit_s, 1.0) / longest if step.unit_s > 0 else 1e9


def _per_s(window: Sequence[tuple[float, Sample]]) -> tuple[float, float]:
    """The mean of the incoming work a second, and its standard error with its bursts."""
    sent = [one.sent for _, one in window[1:]]
    if not sent:
        return 0.0, 0.0
    span_s = window[-1][0] - window[0][0]
    return sum(sent) / span_s, sqrt(len(sent) * pvariance(sent)) / span_s


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """The slope of the least-squares line; 0 for fewer than two moments."""
    mean_t, mean_y = fmean(t for t, _ in points), fmean(y for _, y in points)
    spread = sum((t - mean_t) ** 2 for t, _ in points)
    return sum((t - mean_t) * (y - mean_y) for t, y in points) / spread if spread else 0.0
