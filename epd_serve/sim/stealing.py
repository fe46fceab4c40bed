"""The simulated gateway's queue of requests that wait for a language model, and who takes them from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from epd_serve.routing.stealing import StealRule, Thieves
from epd_serve.routing.table import InstanceRecord, InstanceTable
from epd_serve.sim.clock import Clock

Move = Callable[[InstanceRecord], None]


class SimStealing:
    """Asked whenever a request joins the queue, an encode or a stolen sequence ends, and a collection is over.

    Attributes:
        num_taken: requests, by the name of the thief.
    """

    def __init__(self, clock: Clock, table: InstanceTable, rule: StealRule, model: str) -> None:
        self._clock = clock
        self._table = table
        self._model = model
        self.thieves = Thieves(rule)
        self._queued: dict[str, Move] = {}
        self._taken: dict[str, str] = {}
        self.num_taken: Counter[str] = Counter()
        self._polls_at_s: float | None = None
        self._is_polling = False

    def queued(self, request_id: str, move: Move) -> None:
        """All features of a request are there and it has no token; ``move`` sends it elsewhere."""
        self._queued[request_id] = move
        self.poll()

    def left(self, request_id: str) -> None:
        """It has its first token, or waits no more. Idempotent."""
        self._queued.pop(request_id, None)

    def ended(self, request_id: str) -> None:
        self.left(request_id)
        if (name := self._taken.pop(request_id, None)) is not None:
            self.thieves.ended(name)
        self.poll()

    def taken(self, request_id: str, name: str) -> None:
        """A request, by its name there, is on its way to a thief."""
        self._taken[request_id] = name
        self.thieves.took(name)
        self.num_taken[name] += 1

    def poll(self) -> None:
        if self._is_polling:
            return  # what moves is counted when all of it has moved
        self._is_polling = True
        for record in self.thieves.take(self._table, self._model, len(self._queued), self._clock.now):
            # those that would wait longest; what is about to be computed stays where it is
            _, move = self._queued.popitem()
            move(record)
        self._is_polling = False
        until_s = self.thieves.collect_until_s(self._clock.now)
        if until_s is not None and until_s != self._polls_at_s:
            self._polls_at_s = until_s
            self._clock.at(until_s, self.poll)
