"""Admission control: a request passes its API key's limit and the queue before it may run."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec

from epd_serve.config.keys import hash_key
from epd_serve.errors import Overloaded
from proxy.admission.keys import Authenticator, Client
from proxy.admission.queue import AdmissionQueue, Ticket
from proxy.settings import GatewaySettings


@dataclass(frozen=True, kw_only=True)
class AdmissionControl:
    """``enter`` → :class:`Visit` for every request; all of it on one event loop.

    Attributes:
        timeout_s: longest wait in the queue.
    """

    authenticator: Authenticator
    queue: AdmissionQueue
    timeout_s: float

    def enter(self, client: Client) -> Visit:
        """Let a request of a client in before its body is read. Raises Overloaded over the key's limit.

        The visit must :meth:`Visit.leave` in the end.
        """
        client.enter()
        return Visit(self, client)


class Visit(msgspec.Struct, eq=False):
    """One request between arrival and end."""

    _admission: AdmissionControl
    client: Client
    _priority: int = 0
    _num_choices: int = 1
    _ticket: Ticket | None = None
    _left: bool = False

    def check(self, *, priority: int = 0, num_choices: int = 1) -> None:
        """Set the request's priority and size, before its media are fetched; :meth:`admit` follows.

        Raises Overloaded where :meth:`admit` would or over the key's limit, and InvalidRequest for more choices
        than the key may have.
        """
        self._priority = priority
        self._admission.queue.check_room()
        if num_choices > 1:
            self.client.widen(num_choices)
            self._num_choices = num_choices

    async def admit(self) -> bool:
        """Return when the request may run; True if it waited. Raises Overloaded where the queue is full or the
        wait too long."""
        ticket = self._ticket = self._admission.queue.enter(self._priority, self._num_choices)
        if ticket.admitted is None:
            return False
        limit_s = self._admission.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await ticket.admitted
        except TimeoutError:
            raise Overloaded(
                f"the request waited {limit_s:g} s for its turn, the limit of this gateway; try again later",
                code="queue_timeout",
            ) from None
        return True

    def leave(self) -> None:
        """End the visit: give back its place and its share of the key. Idempotent."""
        if self._left:
            return
        self._left = True
        self.client.leave(self._num_choices)
        if self._ticket is not None:
            self._admission.queue.leave(self._ticket)


def new_admission(settings: GatewaySettings) -> AdmissionControl:
    """Return admission by the gateway's settings."""
    gateway = settings.gateway
    keys = [(key.hash, Client(key.name, key)) for key in gateway.api_keys]
    if settings.api_key is not None:
        keys.append((hash_key(settings.api_key), Client("default")))
    return AdmissionControl(
        authenticator=Authenticator(keys),
        queue=AdmissionQueue(gateway.max_in_flight, gateway.max_queue),
        timeout_s=gateway.queue_timeout_s,
    )
