"""A gateway's language queue: requests without a token whose features are there, and who takes them.

A request is stolen as a whole: all that instances have of it is taken back, and it runs on the thief alone. Of a
request that was stolen once, or whose client has tokens, nothing is stolen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from epd_serve.config.gateway import StealingConfig
from epd_serve.flow.request import RequestFlow
from epd_serve.routing.stealing import StealRule, Thieves
from epd_serve.routing.table import InstanceRecord, InstanceTable


def steal_rule(options: StealingConfig) -> StealRule:
    """The rule that a deployment's options describe."""
    return StealRule(threshold=options.threshold, batch=options.batch, collect_s=options.collect_ms / 1000)


DEFAULT_RULE = steal_rule(StealingConfig())


class Run(Protocol):
    """A request under way, whoever carries it out."""

    @property
    def flow(self) -> RequestFlow: ...


R = TypeVar("R", bound=Run)


class StealQueue(Generic[R]):
    """Attributes:
    queued: requests that may be stolen, in the order in which they came to be.
    num_taken: requests, by the name of the thief.
    """

    def __init__(self, table: InstanceTable, rule: StealRule) -> None:
        self._table = table
        self._rule = rule
        self.thieves = Thieves(rule)
        self.queued: dict[R, None] = {}
        self.num_taken: Counter[str] = Counter()

    @property
    def is_long(self) -> bool:
        """Whether thieves may begin to take from it."""
        return len(self.queued) > self._rule.threshold

    def see(self, run: R) -> None:
        """Something has changed for a request."""
        if run.flow.is_queued:
            self.queued.setdefault(run)
        else:
            self.queued.pop(run, None)

    def ended(self, run: R) -> None:
        """A request is over; once."""
        self.queued.pop(run, None)
        if run.flow.thief is not None:
            self.thieves.ended(run.flow.thief.name)

    def take(self, now_s: float) -> Iterator[tuple[R, InstanceRecord]]:
        """Requests that thieves take now. Each is told at once, by :class:`~epd_serve.flow.events.Stolen`."""
        for model in {run.flow.model for run in self.queued}:
            num_queued = sum(run.flow.model == model for run in self.queued)
            for thief in self.thieves.take(self._table, model, num_queued, now_s):
                if (run := self._last_for(model, thief)) is not None:
                    del self.queued[run]
                    self.thieves.took(thief.name)
                    self.num_taken[thief.name] += 1
                    yield run, thief

    def _last_for(self, model: str, thief: InstanceRecord) -> R | None:
        """Return the last requests for which a thief has room: the first ones may be computed already."""
        longest = 0 if thief.info is None else thief.info.max_model_len
        for run in reversed(self.queued):
            flow = run.flow
            if flow.is_queued and flow.model == model and flow.max_model_len <= longest:
                return run
        return None
