"""Work stealing across tiers (HeteroServe, section 5.3): idle encoders take requests from the language queue.

The queue holds requests without a token whose features are there. A thief is an instance with a tower and a
language model that gets encodes like any encoder and prompts in no other way than this one. A request is stolen as
a whole: all that instances have of it is taken back, and it runs on the thief alone; its features move, no KV
does. Of a request that was stolen once, or whose client has tokens, nothing is stolen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Protocol, TypeVar

from epd_serve.config.gateway import StealingConfig
from epd_serve.flow.request import RequestFlow
from epd_serve.routing.table import InstanceRecord, InstanceTable
from epd_serve.types import Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class StealRule:
    """Section 5.3's parameters.

    Attributes:
        threshold: τ; nothing is taken from a queue that is no longer.
        batch: sequences that a thief may have; it takes half as many at a time.
        collect_s: time in which it may fill such a half, whatever is left in the queue.
    """

    threshold: int
    batch: int
    collect_s: float

    def __post_init__(self) -> None:
        if self.threshold < 0 or self.batch < 2 or not self.collect_s >= 0:
            raise ValueError(
                f"{self}: stealing needs a threshold of 0 or more, a batch of 2 or more, of which half is taken "
                "at a time, and a collection of 0 seconds or more"
            )

    @property
    def half(self) -> int:
        return self.batch // 2


def steal_rule(options: StealingConfig) -> StealRule:
    """The rule that a deployment's options describe."""
    return StealRule(threshold=options.threshold, batch=options.batch, collect_s=options.collect_ms / 1000)


DEFAULT_RULE = steal_rule(StealingConfig())


class Mode(Enum):
    """A thief's activity.

    Any mode may follow any other: media can come at any time, and language follows only behind.
    """

    IDLE = "idle"
    VISION = "vision"
    LANGUAGE = "language"


class Thief:
    """One instance's loop (Algorithm 1), asked as often as anything changes. ``now`` is in seconds."""

    def __init__(self, rule: StealRule) -> None:
        self._rule = rule
        self._began_s: float | None = None  # of the collection under way
        self._collected = 0
        self.mode = Mode.IDLE
        self.num_switches: Counter[tuple[Mode, Mode]] = Counter()

    def take(self, now: float, *, num_items: int, num_queued: int, num_held: int) -> int:
        """The number of requests that the thief takes now.

        Args:
            num_items: media that wait for its tower or are in it. While there are any, it takes nothing, and a
                collection that is under way ends: vision first.
            num_queued: requests that wait for a language model elsewhere.
            num_held: sequences that it has taken and that have not ended.
        """
        if num_items:
            self._began_s = None
            self._enter(Mode.VISION)
            return 0
        if self._began_s is not None and now - self._began_s > self._rule.collect_s:
            self._began_s = None
        rule = self._rule
        if self._began_s is None and num_queued > rule.threshold and num_held + rule.half <= rule.batch:
            self._began_s, self._collected = now, 0
        count = 0
        if self._began_s is not None:
            count = max(min(rule.half - self._collected, rule.batch - num_held, num_queued), 0)
            self._collected += count
            if self._collected == rule.half:
                self._began_s = None
        self._enter(Mode.LANGUAGE if num_held + count else Mode.IDLE)
        return count

    @property
    def collects_until_s(self) -> float | None:
        """The time at which its collection ends; None where none is under way."""
        return None if self._began_s is None else self._began_s + self._rule.collect_s

    def _enter(self, mode: Mode) -> None:
        if mode is not self.mode:
            self.num_switches[self.mode, mode] += 1
            self.mode = mode


class Thieves:
    """All thieves that a gateway knows, by the names of their instances."""

    def __init__(self, rule: StealRule) -> None:
        self._rule = rule
        self._thieves: dict[str, Thief] = {}
        self._held: Counter[str] = Counter()

    def __getitem__(self, name: str) -> Thief:
        if name not in self._thieves:
            self._thieves[name] = Thief(self._rule)
        return self._thieves[name]

    def take(self, table: InstanceTable, model: str, num_queued: int, now: float) -> list[InstanceRecord]:
        """The takers of the next requests from a model's queue: one record for each request."""
        takers: list[InstanceRecord] = []
        for record in thieves_of(table, model):
            pending = record.pending
            count = self[record.name].take(
                now,
                num_items=sum(record.encoding.values()) or int(pending.num_pixels > 0),
                num_queued=num_queued - len(takers),
                num_held=max(self._held[record.name], int(pending.num_sequences)),
            )
            takers += [record] * count
        return takers

    def took(self, name: str) -> None:
        """Count a request that is on its way to a thief, until :meth:`ended`."""
        self._held[name] += 1

    def ended(self, name: str) -> None:
        self._held[name] -= 1
        assert self._held[name] >= 0, f"{name} has given back more than it took"

    def collect_until_s(self, now: float) -> float | None:
        """The earliest end of a collection, if one is under way; a thief that nobody asks any more ends, too."""
        ends = [end for one in self._thieves.values() if (end := one.collects_until_s) is not None and end >= now]
        return min(ends, default=None)


def thieves_of(table: InstanceTable, model: str) -> list[InstanceRecord]:
    """Ready instances that steal; none where every decode instance steals, as there is no queue to take from."""
    thieves = [one for one in table.ready(Stage.ENCODE, model) if one.steals and not one.is_stale]
    if thieves and all(one.steals for one in table.ready(Stage.DECODE, model)):
        return []
    return thieves


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
