"""The queue in front of the instances: who may run now, who waits, who is told to come back. No clock, no I/O."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable
from enum import Enum, auto
from operator import itemgetter

import msgspec

from epd_serve.errors import Overloaded
from proxy.admission.keys import Client

#: Share of the latest request in the average time that requests run.
_SMOOTHING = 0.05
#: The heap of priorities may hold this many that nobody waits with any more, and as many again as are in use.
_MAX_STALE = 64


class TicketState(Enum):
    WAITING = auto()
    ADMITTED = auto()
    LEFT = auto()

    __hash__ = object.__hash__  # in C; tickets move with every request


_ALLOWED = {
    TicketState.WAITING: {TicketState.ADMITTED, TicketState.LEFT},
    TicketState.ADMITTED: {TicketState.LEFT},
    TicketState.LEFT: set(),
}


class Ticket(msgspec.Struct, eq=False, kw_only=True):
    """One request's place. ``on_admitted`` is called when it may run, unless it may at once, ``on_displaced`` when
    it has to make room for another client's."""

    client: Client
    priority: int
    admitted_s: float
    on_admitted: Callable[[], None] | None
    on_displaced: Callable[[], None] | None
    num_choices: int
    state: TicketState = TicketState.WAITING

    def to(self, state: TicketState) -> None:
        assert state in _ALLOWED[self.state], f"a ticket does not go from {self.state} to {state}"
        self.state = state


class AdmissionQueue:
    """Requests begin to run while fewer than ``max_in_flight`` choices do; ``max_queue`` requests wait.

    The last request to begin may be more choices than there is room for, so that it need not wait for a moment in
    which nothing else runs.

    The lowest priority number goes first, as in vLLM; among equals, the client of which the fewest choices run, so
    that neither a thousand requests nor long ones delay another client's by more than the next that ends; a
    client's own go in the order of arrival. A high
    number waits for as long as lower ones come: time limits are the caller's. Where all places to wait are taken,
    the client that has the most of them gives its last for a client that has fewer, so that nobody is kept out by
    another's number of requests.

    ::

        enter ──> WAITING ──> ADMITTED
             │       │ leave,     │ leave: the next one is admitted
             │       │ displaced  │
             │       v            v
             │      LEFT         LEFT
             └──> ADMITTED at once, while there is room
    """

    def __init__(self, max_in_flight: int, max_queue: int) -> None:
        self.max_in_flight = max_in_flight
        self._max_queue = max_queue
        self._levels: dict[int, OrderedDict[Client, OrderedDict[Ticket, None]]] = {}
        self._priorities: list[int] = []  # a heap; may hold priorities without a level
        self._waiting: Counter[Client] = Counter()
        self._mean_run_s: float | None = None
        self._running: Counter[Client] = Counter()
        self.num_in_flight = 0
        self.num_running = 0
        self.num_waiting = 0

    def enter(
        self,
        client: Client,
        priority: int,
        now_s: float,
        on_admitted: Callable[[], None] | None = None,
        on_displaced: Callable[[], None] | None = None,
        num_choices: int = 1,
    ) -> Ticket:
        """A place for a request, ADMITTED or WAITING. Every ticket must be given to :meth:`leave` in the end, but
        for one that was displaced.

        Raises Overloaded, with the estimated wait, where the queue is full and no other client gives way.
        """
        ticket = Ticket(
            client=client,
            priority=priority,
            admitted_s=now_s,
            on_admitted=on_admitted,
            on_displaced=on_displaced,
            num_choices=num_choices,
        )
        if self.num_in_flight < self.max_in_flight:
            assert not self.num_waiting, "nobody waits while there is room"
            self._run(ticket, now_s)
            return ticket
        if (last := self.displaced_by(client, priority)) is not None:
            last.to(TicketState.LEFT)
            self._remove(last)
            if last.on_displaced is not None:
                last.on_displaced()
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = OrderedDict()
            self._push(priority)
        level.setdefault(client, OrderedDict())[ticket] = None
        self._waiting[client] += 1
        self.num_waiting += 1
        return ticket

    def displaced_by(self, client: Client, priority: int) -> Ticket | None:
        """The request that has to make room for one more that waits: the last of the longest queue, unless
        ``client``'s own would be as long then, or what there is to displace is more urgent than ``priority``.

        None while there is room. Raises Overloaded where nobody gives way.
        """
        if self.num_waiting < self._max_queue:
            return None
        own = self._waiting[client] + 1
        longer = [(number, other) for other, number in self._waiting.items() if number > own]
        for _, other in sorted(longer, key=itemgetter(0), reverse=True):
            last = max(level for level in self._levels if other in self._levels[level])
            if last >= priority:
                return next(reversed(self._levels[last][other]))
        raise Overloaded(
            f"{self.num_running} requests are running here and {self.num_waiting} are waiting, which is all "
            "that this gateway takes; try again later",
            retry_after_s=self.estimated_wait_s(),
        )

    def leave(self, ticket: Ticket, now_s: float, *, ran: bool = True) -> None:
        """The request is over, or has given up waiting; in either case once. Admits who is next.

        ``ran``: False for one that was admitted and turned away, so that its time is no run's.
        """
        waited = ticket.state is TicketState.WAITING
        ticket.to(TicketState.LEFT)
        if waited:
            self._remove(ticket)
            return
        self.num_running -= 1
        self.num_in_flight -= ticket.num_choices
        self._running[ticket.client] -= ticket.num_choices
        if not self._running[ticket.client]:
            del self._running[ticket.client]
        if ran:
            ran_s = max(0.0, now_s - ticket.admitted_s)
            mean = self._mean_run_s
            self._mean_run_s = ran_s if mean is None else mean + _SMOOTHING * (ran_s - mean)
        if self.num_waiting:
            self._admit(now_s)

    def resize(self, max_in_flight: int, max_queue: int, now_s: float) -> None:
        """New limits; who runs or waits beyond them may finish."""
        self.max_in_flight, self._max_queue = max_in_flight, max_queue
        self._admit(now_s)

    def estimated_wait_s(self) -> float | None:
        """Seconds that a request which comes now would wait, by Little's law from the average time of a run; None
        while no request has finished yet."""
        if self.num_in_flight < self.max_in_flight:
            return 0.0
        if self._mean_run_s is None:
            return None
        return (self.num_waiting + 1) * self._mean_run_s / max(1, self.num_running)

    def check_integrity(self) -> None:
        """Raises AssertionError where the books do not agree."""
        waiting = [ticket for level in self._levels.values() for own in level.values() for ticket in own]
        assert len(waiting) == self.num_waiting
        assert Counter(ticket.client for ticket in waiting) == self._waiting
        assert all(self._waiting.values())
        assert sum(self._running.values()) == self.num_in_flight and all(self._running.values())
        assert self.num_running <= self.num_in_flight
        assert all(ticket.state is TicketState.WAITING for ticket in waiting)
        assert all(level and all(level.values()) for level in self._levels.values()), "no empty place is kept"
        assert set(self._levels) <= set(self._priorities)
        assert len(self._priorities) <= 2 * max(self._max_queue, self.num_waiting) + _MAX_STALE + 1
        assert self.num_in_flight >= self.max_in_flight or not waiting, "nobody waits while there is room"

    def _admit(self, now_s: float) -> None:
        while self.num_waiting and self.num_in_flight < self.max_in_flight:
            ticket = self._next()
            self._remove(ticket)
            self._run(ticket, now_s)
            if ticket.on_admitted is not None:
                ticket.on_admitted()

    def _run(self, ticket: Ticket, now_s: float) -> None:
        ticket.to(TicketState.ADMITTED)
        ticket.admitted_s = now_s
        self.num_running += 1
        self.num_in_flight += ticket.num_choices
        self._running[ticket.client] += ticket.num_choices

    def _next(self) -> Ticket:
        while self._priorities[0] not in self._levels:
            heapq.heappop(self._priorities)
        level = self._levels[self._priorities[0]]
        client = min(level, key=self._running.__getitem__)  # of several, whose turn was longest ago
        level.move_to_end(client)
        return next(iter(level[client]))

    def _remove(self, ticket: Ticket) -> None:
        level = self._levels[ticket.priority]
        own = level[ticket.client]
        del own[ticket]
        if not own:
            del level[ticket.client]
            if not level:
                del self._levels[ticket.priority]
        self._waiting[ticket.client] -= 1
        if not self._waiting[ticket.client]:
            del self._waiting[ticket.client]
        self.num_waiting -= 1

    def _push(self, priority: int) -> None:
        heapq.heappush(self._priorities, priority)
        if len(self._priorities) > 2 * len(self._levels) + _MAX_STALE:
            self._priorities = sorted(self._levels)
