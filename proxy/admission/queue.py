"""The bounded queue before the instances."""

from __future__ import annotations

import asyncio
import heapq
from enum import Enum, auto

import msgspec

from epd_serve.errors import Overloaded

#: The heap may hold this many tickets that gave up waiting, and as many again as wait.
_MAX_STALE = 64


class TicketState(Enum):
    WAITING = auto()
    RUNNING = auto()
    LEFT = auto()


class Ticket(msgspec.Struct, eq=False):
    """One request's place.

    Attributes:
        admitted: done when the request may run, unless it was cancelled; None: it may run at once.
    """

    num_choices: int
    state: TicketState = TicketState.WAITING
    admitted: asyncio.Future[None] | None = None


class AdmissionQueue:
    """Requests begin to run while fewer than ``max_in_flight`` choices run; at most ``max_queue`` requests wait.

    The lowest priority number goes first, as in vLLM, and equals go in order of arrival. The last request to begin
    may have more choices than there is room for, so that it need not wait until nothing else runs.
    """

    def __init__(self, max_in_flight: int, max_queue: int) -> None:
        self.max_in_flight = max_in_flight
        self.max_queue = max_queue
        self.num_in_flight = 0
        self.num_running = 0
        self.num_waiting = 0
        self._num_entered = 0
        self._heap: list[tuple[int, int, Ticket]] = []  # may hold tickets that gave up

    def check_room(self) -> None:
        """Raise Overloaded where one more request could neither run nor wait."""
        if self.num_in_flight >= self.max_in_flight and self.num_waiting >= self.max_queue:
            raise Overloaded(
                f"{self.num_running} requests are running here and {self.num_waiting} are waiting, which is all "
                "that this gateway takes; try again later"
            )

    def enter(self, priority: int, num_choices: int = 1) -> Ticket:
        """Return a place for a request, which must :meth:`leave`. Raises Overloaded where the queue is full."""
        ticket = Ticket(num_choices)
        if self.num_in_flight < self.max_in_flight:
            self._run(ticket)
            return ticket
        self.check_room()
        ticket.admitted = asyncio.get_running_loop().create_future()
        self._num_entered += 1
        self.num_waiting += 1
        heapq.heappush(self._heap, (priority, self._num_entered, ticket))
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """End a request that runs or waits; once."""
        state, ticket.state = ticket.state, TicketState.LEFT
        if state is TicketState.RUNNING:
            self.num_running -= 1
            self.num_in_flight -= ticket.num_choices
            self._admit()
            return
        assert state is TicketState.WAITING, "a ticket leaves once"
        self.num_waiting -= 1
        if len(self._heap) > 2 * self.num_waiting + _MAX_STALE:
            self._heap = [entry for entry in self._heap if entry[2].state is TicketState.WAITING]
            heapq.heapify(self._heap)

    def _admit(self) -> None:
        while self.num_waiting and self.num_in_flight < self.max_in_flight:
            _, _, ticket = heapq.heappop(self._heap)
            if ticket.state is TicketState.LEFT:
                continue
            self.num_waiting -= 1
            self._run(ticket)
            if ticket.admitted is not None and not ticket.admitted.done():  # else its request is about to leave
                ticket.admitted.set_result(None)

    def _run(self, ticket: Ticket) -> None:
        ticket.state = TicketState.RUNNING
        self.num_running += 1
        self.num_in_flight += ticket.num_choices
