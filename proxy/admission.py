"""Admission: API keys with limits, then one bounded queue."""

from __future__ import annotations

import asyncio
import heapq
import hmac
from collections.abc import Iterable
from enum import Enum, auto
from hashlib import sha256
from typing import ClassVar

import msgspec

from epd_serve.config.keys import HASH_PREFIX
from epd_serve.errors import InvalidRequest, Overloaded, ServeError
from proxy.settings import GatewaySettings

#: The name of all callers without keys.
ANONYMOUS = "anonymous"
#: Longer bearer tokens are refused unhashed.
MAX_TOKEN_BYTES = 4096
_NO_DIGEST = bytes(32)
#: The heap may hold this many visits that gave up, plus as many as wait.
_MAX_STALE = 64


class Unauthorized(ServeError):
    status: ClassVar[int] = 401
    type: ClassVar[str] = "authentication_error"
    default_code: ClassVar[str | None] = "invalid_api_key"


class Holder:
    """The holder of an API key, or all callers together without keys.

    Attributes:
        num_active: choices of requests in progress.
    """

    __slots__ = ("max_concurrent", "name", "num_active")

    def __init__(self, name: str, max_concurrent: int | None = None) -> None:
        self.name = name
        self.max_concurrent = max_concurrent
        self.num_active = 0

    def enter(self) -> None:
        """Count a request until :meth:`leave`. Raises Overloaded over the limit."""
        most = self.max_concurrent
        if most is not None and self.num_active >= most:
            raise Overloaded(
                f"this API key has {self.num_active} requests in progress, its limit (each choice counts as one)",
                code="rate_limit_exceeded",
            )
        self.num_active += 1

    def count_choices(self, num_choices: int) -> None:
        """Count a request in progress as ``num_choices``.

        Raises Overloaded over the key's limit, InvalidRequest for a request that exceeds it alone.
        """
        most = self.max_concurrent
        if most is not None and num_choices > most:
            raise InvalidRequest(
                f"this API key may have {most} choices in progress; this request asks for {num_choices}",
                param="n",
            )
        if most is not None and (others := self.num_active - 1) + num_choices > most:
            raise Overloaded(
                f"this API key has {others} requests in progress and may have {most}, including the {num_choices} "
                "choices of this one (each choice counts as one)",
                code="rate_limit_exceeded",
            )
        self.num_active += num_choices - 1

    def leave(self, num_choices: int = 1) -> None:
        assert self.num_active >= num_choices
        self.num_active -= num_choices


class Authenticator:
    """Finds the holder of a bearer token.

    Attributes:
        anonymous: all callers without keys; None if there are keys.
    """

    def __init__(self, keys: Iterable[tuple[str, Holder]]) -> None:
        """``keys``: pairs of a hash (:func:`epd_serve.config.keys.hash_key`) and its holder."""
        self._holders = {bytes.fromhex(text.removeprefix(HASH_PREFIX)): holder for text, holder in keys}
        self.anonymous = None if self._holders else Holder(ANONYMOUS)

    @property
    def holders(self) -> list[Holder]:
        return list(self._holders.values()) if self.anonymous is None else [self.anonymous]

    def check(self, authorization: str | bytes | None, api_key: str | bytes | None = None) -> Holder:
        """Return the holder for an ``Authorization`` header or Anthropic's ``x-api-key``. Raises Unauthorized.

        Timing reveals nothing about the keys: they are found by a digest that the caller cannot control, in a
        randomised hash table, and compared in constant time.
        """
        if self.anonymous is not None:
            return self.anonymous
        # frameworks decode headers as Latin-1
        given = authorization or api_key or b""
        header = given.encode("latin-1") if isinstance(given, str) else given
        scheme, _, token = header.partition(b" ") if authorization else (b"bearer", b"", header)
        token = token.strip()
        if scheme.lower() != b"bearer" or not token:
            raise Unauthorized("an API key is required: send the header 'Authorization: Bearer <key>'")
        if len(token) <= MAX_TOKEN_BYTES:
            digest = sha256(token).digest()
            holder = self._holders.get(digest)
            if hmac.compare_digest(digest if holder is not None else _NO_DIGEST, digest) and holder is not None:
                return holder
        raise Unauthorized("this gateway does not know the API key")


class VisitState(Enum):
    ARRIVED = auto()
    WAITING = auto()
    RUNNING = auto()
    LEFT = auto()


class Visit(msgspec.Struct, eq=False):
    """One request from arrival to end; it must :meth:`leave`.

    Attributes:
        admitted: done when a waiting request may run.
    """

    holder: Holder
    _queue: AdmissionQueue
    priority: int = 0
    num_choices: int = 1
    state: VisitState = VisitState.ARRIVED
    admitted: asyncio.Future[None] | None = None

    def check(self, *, priority: int = 0, num_choices: int = 1) -> None:
        """Set the request's priority and size before its media are fetched.

        Raises Overloaded if the queue is full or the key over its limit, InvalidRequest for more choices than the
        key may have.
        """
        self.priority = priority
        self._queue.check_room()
        if num_choices > 1:
            self.holder.count_choices(num_choices)
            self.num_choices = num_choices

    async def admit(self) -> bool:
        """Return when the request may run; True if it waited. Raises Overloaded if it waits too long."""
        self._queue.enter(self)
        if self.admitted is None:
            return False
        limit_s = self._queue.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self.admitted
        except TimeoutError:
            raise Overloaded(
                f"the request waited {limit_s:g} s in the queue, the limit of this gateway; try again later",
                code="queue_timeout",
            ) from None
        return True

    def leave(self) -> None:
        """Release the request's place and its share of the key's limit; call once."""
        self.holder.leave(self.num_choices)
        self._queue.leave(self)


class AdmissionQueue:
    """Runs requests while fewer than ``max_in_flight`` choices run; ``max_queue`` may wait up to ``timeout_s``.

    The lowest priority number goes first, as in vLLM; equals go by arrival. The last request to start may exceed
    ``max_in_flight``, so that one with many choices need not wait for an idle gateway.
    """

    def __init__(self, max_in_flight: int, max_queue: int, timeout_s: float) -> None:
        self.max_in_flight = max_in_flight
        self.max_queue = max_queue
        self.timeout_s = timeout_s
        self.num_in_flight = 0
        self.num_running = 0
        self.num_waiting = 0
        self._num_entered = 0
        self._heap: list[tuple[int, int, Visit]] = []  # includes visits that gave up

    def check_room(self) -> None:
        """Raise Overloaded if another request could neither run nor wait."""
        if self.num_in_flight >= self.max_in_flight and self.num_waiting >= self.max_queue:
            raise Overloaded(
                f"this gateway is full: {self.num_running} requests are running, {self.num_waiting} are waiting; "
                "try again later"
            )

    def enter(self, visit: Visit) -> None:
        """Let a request run or wait. Raises Overloaded if the queue is full."""
        if self.num_in_flight < self.max_in_flight:
            self._run(visit)
            return
        self.check_room()
        visit.admitted, visit.state = asyncio.get_running_loop().create_future(), VisitState.WAITING
        self._num_entered += 1
        self.num_waiting += 1
        heapq.heappush(self._heap, (visit.priority, self._num_entered, visit))

    def leave(self, visit: Visit) -> None:
        """End a request in any state; call once."""
        state, visit.state = visit.state, VisitState.LEFT
        assert state is not VisitState.LEFT, "a request leaves once"
        if state is VisitState.RUNNING:
            self.num_running -= 1
            self.num_in_flight -= visit.num_choices
            self._admit()
        elif state is VisitState.WAITING:
            self.num_waiting -= 1
            if len(self._heap) > 2 * self.num_waiting + _MAX_STALE:
                self._heap = [entry for entry in self._heap if entry[2].state is VisitState.WAITING]
                heapq.heapify(self._heap)

    def _admit(self) -> None:
        while self.num_waiting and self.num_in_flight < self.max_in_flight:
            _, _, visit = heapq.heappop(self._heap)
            if visit.state is VisitState.LEFT:
                continue
            self.num_waiting -= 1
            self._run(visit)
            if visit.admitted is not None and not visit.admitted.done():  # else it is leaving
                visit.admitted.set_result(None)

    def _run(self, visit: Visit) -> None:
        visit.state = VisitState.RUNNING
        self.num_running += 1
        self.num_in_flight += visit.num_choices


class Admission:
    """The keys and the queue of a gateway."""

    def __init__(self, settings: GatewaySettings) -> None:
        gateway = settings.gateway
        self.authenticator = Authenticator(
            (key.hash, Holder(key.name, key.max_concurrent)) for key in gateway.api_keys
        )
        self.queue = AdmissionQueue(gateway.max_in_flight, gateway.max_queue, gateway.queue_timeout_s)
