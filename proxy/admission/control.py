"""Admission control: a request passes its API key's check, the key's limits and the queue before it may run.

Plain objects, for any kind of server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from epd_serve.config.keys import hash_key
from epd_serve.errors import InvalidRequest, Overloaded
from epd_serve.routing.table import InstanceTable
from epd_serve.types import Stage
from proxy.admission.keys import Authenticator, Client
from proxy.admission.queue import AdmissionQueue, Ticket, TicketState
from proxy.observe.metrics import GatewayMetrics
from proxy.settings import Current, GatewaySettings

#: The charge for an answer of which nothing says how long it may be, which is as in completions: how long it gets
#: nobody knows yet.
_OPEN_TOKENS = 16


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


@dataclass(eq=False)
class AdmissionControl:
    """``enter`` → :class:`Visit` for every request; all of it on one event loop.

    Attributes:
        refused: told the code of each Overloaded and the name of the key.
        waited: told the seconds of each wait in the queue.
    """

    authenticator: Authenticator
    queue: AdmissionQueue
    settings: Current = field(kw_only=True)
    shedding: Shedding | None = None
    refused: Callable[[str, str], None] = lambda reason, key: None
    waited: Callable[[float], None] = lambda seconds: None
    clock: Callable[[], float] = time.monotonic

    def enter(self, authorization: str | bytes | None) -> Visit:
        """Before the body is read. Raises Unauthorized, or Overloaded where the key's limits say no.

        The visit must :meth:`Visit.leave` in the end.
        """
        client = self.authenticator.anonymous or self.authenticator.check(authorization)
        now_s = self.clock()
        try:
            client.enter(now_s)
        except Overloaded as error:
            self.refused(error.code or "", client.name)
            raise
        return Visit(self, client, now_s)


class Visit(msgspec.Struct, eq=False):
    """One request between arrival and end."""

    _admission: AdmissionControl
    client: Client
    _entered_s: float
    _queued_s: float = 0.0
    _ticket: Ticket | None = None
    _waiting: asyncio.Future[None] | None = None
    _timer: asyncio.TimerHandle | None = None
    _left: bool = False
    _generates: bool = True
    _num_choices: int = 1
    _priority: int = 0
    _prompt: tuple[int, bool] = (0, False)
    _charged: int = 0

    def check(
        self,
        *,
        priority: int | None = None,
        num_prompt_tokens: int = 0,
        max_tokens: int | None = None,
        has_media: bool = False,
        generates: bool = True,
        num_choices: int = 1,
    ) -> None:
        """Say what the request is, once that is known and before anything is fetched for it; :meth:`admit` next.

        Its prompt's tokens, the most of each of its answers and their number, ``num_choices``, are what the key is
        charged if it runs; the prompt's tokens and media say how long instances will take. A request that
        ``generates`` nothing has no first token to be late, its time is not that of a run, and it is not charged.
        ``priority`` None: the middle, 0, or the highest that the key may send.

        Raises Overloaded where :meth:`admit` would or over the key's limits, and InvalidRequest for a priority
        above the key's or more choices than it may have.
        """
        admission, client = self._admission, self.client
        highest = client.limits.highest_priority
        if priority is None:
            priority = max(0, highest or 0)
        if highest is not None and priority < highest:
            raise InvalidRequest(
                f"this API key may send priority {highest} or a greater number, which is less urgent; "
                f"got {priority}",
                param="priority",
            )
        self._priority = priority
        self._generates = generates
        self._prompt = (num_prompt_tokens, has_media)
        now_s = admission.clock()
        try:
            if has_media:
                if admission.shedding is not None:
                    self._check_time(admission.shedding, now_s)
                queue = admission.queue
                if queue.num_in_flight >= queue.max_in_flight:
                    queue.displaced_by(client, priority)
            if num_choices > 1:
                client.widen(num_choices)
                self._num_choices = num_choices
            if generates and client.tokens is not None:  # others wait for no debt of the key, either
                most = _OPEN_TOKENS if max_tokens is None else max_tokens
                num_tokens = num_prompt_tokens + most * num_choices
                client.charge(num_tokens, now_s)
                self._charged = num_tokens
        except Overloaded as error:
            self._refused(error)
            raise

    def admit(self) -> asyncio.Future[None] | None:
        """Ask to run. None: at once. Else a future to await: done when it may run, or Overloaded after the queue's
        time limit. It may be cancelled, or simply left.

        Overloaded also where the request has to give its place in a full queue to another key's.

        Raises Overloaded where the queue is full or the SLO is out of reach.
        """
        admission = self._admission
        assert self._ticket is None and not self._left
        now_s = self._queued_s = admission.clock()
        try:
            if admission.shedding is not None:
                self._check_time(admission.shedding, now_s)
            ticket = self._ticket = admission.queue.enter(
                self.client, self._priority, now_s, self._on_admitted, self._on_displaced, self._num_choices
            )
        except Overloaded as error:
            self._refused(error)
            raise
        if ticket.state is TicketState.ADMITTED:
            return None
        loop = asyncio.get_running_loop()
        self._waiting = loop.create_future()
        self._timer = loop.call_later(admission.settings.now.gateway.queue_timeout_s, self._on_timeout)
        return self._waiting

    def _refused(self, error: Overloaded) -> None:
        self._refund()
        self._admission.refused(error.code or "", self.client.name)

    def _check_time(self, shedding: Shedding, now_s: float) -> None:
        """Raises Overloaded where the SLO is out of reach."""
        if self._generates:
            spent_s = now_s - self._entered_s + (self._admission.queue.estimated_wait_s() or 0.0)
            shedding.check(spent_s, *self._prompt)

    def leave(self) -> None:
        """The request is over, however it went. Idempotent: gives back its place and its share of the key."""
        if self._left:
            return
        self._left = True
        if self._timer is not None:
            self._timer.cancel()
        try:
            self.client.leave(self._num_choices)
        finally:
            self._give_up_place()
            if self._waiting is not None and not self._waiting.cancel() and not self._waiting.cancelled():
                self._waiting.exception()  # seen: nobody may be left to await it

    def _give_up_place(self, ran: bool = True) -> None:
        ticket, self._ticket = self._ticket, None
        try:
            if ticket is None or ticket.state is TicketState.WAITING or not ran:
                self._refund()
        finally:
            if ticket is not None:
                self._admission.queue.leave(ticket, self._admission.clock(), ran=ran and self._generates)

    def _refund(self) -> None:
        """The key is charged for what runs only."""
        charged, self._charged = self._charged, 0
        if charged:
            self.client.refund(charged)

    def _on_admitted(self) -> None:
        assert self._timer is not None and self._waiting is not None
        admission, waiting = self._admission, self._waiting
        self._timer.cancel()
        now_s = admission.clock()
        admission.waited(now_s - self._queued_s)
        if waiting.done():
            return  # cancelled: the request is on its way out, and leave() frees the place
        try:
            if admission.shedding is not None and self._generates:
                admission.shedding.check(now_s - self._entered_s, *self._prompt)
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
                retry_after_s=self._admission.queue.estimated_wait_s(),
            )
        )

    def _on_timeout(self) -> None:
        admission = self._admission
        self._give_up_place()
        waited_s = admission.settings.now.gateway.queue_timeout_s
        self._refuse(
            Overloaded(
                f"the request waited {waited_s:g} s for its turn, the limit of this gateway; try again later",
                code="queue_timeout",
                retry_after_s=admission.queue.estimated_wait_s(),
            )
        )

    def _refuse(self, error: Overloaded) -> None:
        assert self._waiting is not None
        self._admission.refused(error.code or "", self.client.name)
        if not self._waiting.done():
            self._waiting.set_exception(error)


def new_admission(current: Current, table: InstanceTable, metrics: GatewayMetrics) -> AdmissionControl:
    """Return admission to the instances of ``table`` by the gateway's settings; ``metrics`` show what it does."""
    settings = current.now
    queue = AdmissionQueue(settings.gateway.max_in_flight, settings.gateway.max_queue)
    metrics.watch_admission(lambda: queue.num_running, lambda: queue.num_waiting)
    return AdmissionControl(
        Authenticator(key_holders(settings)),
        queue,
        settings=current,
        shedding=_shedding(settings, table),
        refused=lambda reason, key: metrics.refused.labels(reason, key).inc(),
        waited=metrics.queue_wait.observe,
    )


def key_holders(settings: GatewaySettings) -> list[tuple[str, Client]]:
    """Return (hash, holder) of all API keys."""
    keys = [(key.hash, Client(key.name, key)) for key in settings.gateway.api_keys]
    if settings.api_key is not None:
        keys.append((hash_key(settings.api_key), Client("default")))
    return keys


def _shedding(settings: GatewaySettings, table: InstanceTable) -> Shedding | None:
    if settings.shed_ttft_s is None:
        return None
    return Shedding(
        ttft_s=settings.shed_ttft_s,
        pending_s=lambda num_tokens, has_media: first_token_s(table, num_tokens, has_media=has_media),
    )


def first_token_s(table: InstanceTable, num_prompt_tokens: int, *, has_media: bool) -> float:
    """Estimated seconds until the least loaded instances could give a new request its first token.

    Encoding and prefilling wait side by side, so the longer queue counts; the prompt's own computation and the
    wait for KV room at D come behind. 0 where no instance is ready, or nothing is known: an estimate to refuse
    requests by must not be too high.
    """
    prefills = table.ready(Stage.PREFILL)
    decodes = table.ready(Stage.DECODE)
    if not prefills or not decodes:
        return 0.0
    waiting = min(record.prefill_s for record in prefills)
    if has_media and (encoders := table.ready(Stage.ENCODE)):
        waiting = max(waiting, min(record.encode_s for record in encoders))
    computing = min(record.costs.prefill_s(num_prompt_tokens) for record in prefills)
    return waiting + computing + min(record.room_s(num_prompt_tokens) for record in decodes)
