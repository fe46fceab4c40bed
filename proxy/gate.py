"""What a request passes before it may run: API key, the key's limits, the admission queue. Plain objects, for any
kind of server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from epd_serve.errors import InvalidRequest, Overloaded
from proxy.admission import AdmissionQueue, Ticket, TicketState
from proxy.auth import Authenticator
from proxy.limits import Client
from proxy.settings import Current


@dataclass(frozen=True, kw_only=True, slots=True)
class Shedding:
    """Refuses what comes too late anyway.

    Attributes:
        ttft_s: the longest time to first token of the SLO.
        pending_s: estimated seconds until the least loaded instances could give a request its first token; of the
            number of tokens of its prompt and whether it has media.
    """

    ttft_s: float
    pending_s: Callable[[int, bool], float]

    def check(self, spent_s: float, num_prompt_tokens: int, has_media: bool) -> None:
        """Raises Overloaded where a first token cannot come within the SLO any more, ``spent_s`` after arrival."""
        late_s = spent_s + self.pending_s(num_prompt_tokens, has_media) - self.ttft_s
        if late_s > 0:
            raise Overloaded(
                f"the first token would come {late_s:.3g} s after this deployment's limit of {self.ttft_s:g} s; "
                f"try again in about {late_s:.3g} s",
                code="slo_unattainable",
                retry_after_s=late_s,
            )


class Gate:
    """``enter`` → :class:`Visit` for every request; all of it on one event loop."""

    def __init__(
        self,
        authenticator: Authenticator,
        queue: AdmissionQueue,
        *,
        settings: Current,
        shedding: Shedding | None = None,
        refused: Callable[[str, str], None] = lambda reason, key: None,
        waited: Callable[[float], None] = lambda seconds: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``refused`` is told the code of each Overloaded and the name of the key, ``waited`` the seconds of each
        wait in the queue."""
        self.authenticator = authenticator
        self.queue = queue
        self.settings = settings
        self.shedding = shedding
        self.refused = refused
        self.waited = waited
        self.clock = clock

    def enter(self, authorization: str | bytes | None) -> Visit:
        """Before the body is read. Raises Unauthorized, or Overloaded where the key's limits say no.

        The visit must :meth:`Visit.leave` in the end.
        """
        client = self.authenticator.check(authorization)
        now_s = self.clock()
        try:
            client.enter(now_s)
        except Overloaded as error:
            self.refused(error.code or "", client.name)
            raise
        return Visit(self, client, now_s)


class Visit:
    """One request between arrival and end."""

    __slots__ = (
        "_charged",
        "_entered_s",
        "_gate",
        "_generates",
        "_left",
        "_prompt",
        "_ticket",
        "_timer",
        "_waiting",
        "client",
    )

    def __init__(self, gate: Gate, client: Client, entered_s: float) -> None:
        self.client = client
        self._gate = gate
        self._entered_s = entered_s
        self._ticket: Ticket | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._left = False
        self._generates = True
        self._prompt = (0, False)
        self._charged = 0

    def admit(
        self,
        *,
        priority: int | None = None,
        num_tokens: int = 0,
        num_prompt_tokens: int = 0,
        has_media: bool = False,
        generates: bool = True,
    ) -> asyncio.Future[None] | None:
        """Ask to run, once the request is known. None: at once. Else a future to await: done when it may run, or
        Overloaded after the queue's time limit. It may be cancelled, or simply left.

        ``num_tokens`` is what the key is charged if it runs; the prompt's tokens and media say how long instances
        will take. A request that ``generates`` nothing has no first token to be late, and its time is not that of
        a run. ``priority`` None: the middle, 0, or the highest that the key may send.

        Overloaded also where the request has to give its place in a full queue to another key's.

        Raises Overloaded where the queue is full, the key's tokens are used up, or the SLO is out of reach, and
        InvalidRequest for a priority above the key's.
        """
        gate, client = self._gate, self.client
        assert self._ticket is None and not self._left
        highest = client.limits.highest_priority
        if priority is None:
            priority = max(0, highest or 0)
        self._generates = generates
        if highest is not None and priority < highest:
            raise InvalidRequest(
                f"this API key may send priority {highest} or a greater number, which is less urgent; "
                f"got {priority}",
                param="priority",
            )
        now_s = gate.clock()
        self._prompt = (num_prompt_tokens, has_media)
        try:
            if gate.shedding is not None and generates:
                spent_s = now_s - self._entered_s + (gate.queue.estimated_wait_s() or 0.0)
                gate.shedding.check(spent_s, *self._prompt)
            if num_tokens:  # else it waits for no debt of the key, either
                client.charge(num_tokens, now_s)
            self._charged = num_tokens
            ticket = self._ticket = gate.queue.enter(
                client, priority, now_s, self._on_admitted, self._on_displaced
            )
        except Overloaded as error:
            self._refund()
            gate.refused(error.code or "", client.name)
            raise
        if ticket.state is TicketState.ADMITTED:
            return None
        loop = asyncio.get_running_loop()
        self._waiting = loop.create_future()
        self._timer = loop.call_later(gate.settings.now.gateway.queue_timeout_s, self._on_timeout)
        return self._waiting

    def leave(self) -> None:
        """The request is over, however it went. Idempotent: gives back its place and its share of the key."""
        if self._left:
            return
        self._left = True
        if self._timer is not None:
            self._timer.cancel()
        try:
            self.client.leave()
        finally:
            self._leave_queue()

    def _leave_queue(self) -> None:
        self._give_up_place()
        if self._waiting is not None and not self._waiting.cancel() and not self._waiting.cancelled():
            self._waiting.exception()  # seen: nobody may be left to await it

    def _give_up_place(self, ran: bool = True) -> None:
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            try:
                if ticket.state is TicketState.WAITING or not ran:
                    self._refund()
            finally:
                self._gate.queue.leave(ticket, self._gate.clock(), ran=ran and self._generates)

    def _refund(self) -> None:
        """The key is charged for what runs only."""
        charged, self._charged = self._charged, 0
        self.client.refund(charged)

    def _on_admitted(self) -> None:
        assert self._timer is not None and self._waiting is not None
        gate, waiting = self._gate, self._waiting
        self._timer.cancel()
        now_s = gate.clock()
        gate.waited(now_s - self._entered_s)
        if waiting.done():
            return  # cancelled: the request is on its way out, and leave() frees the place
        try:
            if gate.shedding is not None and self._generates:
                gate.shedding.check(now_s - self._entered_s, *self._prompt)
        except Overloaded as error:
            self._refuse(error)
            # Not now: the queue is in the middle of admitting.
            asyncio.get_running_loop().call_soon(self._give_up_place, False)
        else:
            waiting.set_result(None)

    def _on_displaced(self) -> None:
        assert self._timer is not None
        self._timer.cancel()
        self._ticket = None
        self._refund()
        self._refuse(
            Overloaded(
                "the queue of this gateway is full, and no other API key has as many requests in it as this one: "
                "this request has made room for another's; send fewer at a time, or try again later",
                retry_after_s=self._gate.queue.estimated_wait_s(),
            )
        )

    def _on_timeout(self) -> None:
        gate = self._gate
        self._give_up_place()
        waited_s = gate.settings.now.gateway.queue_timeout_s
        self._refuse(
            Overloaded(
                f"the request waited {waited_s:g} s for its turn, the limit of this gateway; try again later",
                code="queue_timeout",
                retry_after_s=gate.queue.estimated_wait_s(),
            )
        )

    def _refuse(self, error: Overloaded) -> None:
        assert self._waiting is not None
        self._gate.refused(error.code or "", self.client.name)
        if not self._waiting.done():
            self._waiting.set_exception(error)
