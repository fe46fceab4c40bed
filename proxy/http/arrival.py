"""The time that a request may take to arrive: slow senders must not hold connections and memory for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from epd_serve.config import GatewayConfig
from epd_serve.errors import InvalidRequest

#: What every body may take besides the time that its length allows.
GRACE_S = 10.0


class TooSlow(InvalidRequest):
    """The body did not arrive in time; the connection cannot be used again."""

    status: ClassVar[int] = 408
    default_code: ClassVar[str | None] = "request_timeout"


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrivalLimits:
    """Seconds for a request line with its headers and for a body, and the fewest bytes of a body per second."""

    header_s: float
    body_s: float
    min_body_rate: float

    @classmethod
    def of(cls, gateway: GatewayConfig) -> ArrivalLimits:
        return cls(
            header_s=gateway.header_timeout_s, body_s=gateway.body_timeout_s, min_body_rate=gateway.min_body_rate
        )

    def time_for_body(self, declared: int | None) -> float:
        """Seconds within which a body must be here; ``declared`` is its Content-Length, None where it has none."""
        return self.body_s if declared is None else min(self.body_s, GRACE_S + declared / self.min_body_rate)

    def too_slow(self, declared: int | None) -> TooSlow:
        return TooSlow(f"the body did not arrive within {self.time_for_body(declared):.3g} s; send it faster")


class HeadWatch:
    """Calls ``on_late`` when the head of a request is not complete in time.

    One timer per connection, set anew at most once per ``header_s``: a request costs two assignments.
    """

    __slots__ = ("_header_s", "_loop", "_on_late", "_since_s", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, header_s: float, on_late: Callable[[], None]) -> None:
        self._loop = loop
        self._header_s = header_s
        self._on_late = on_late
        self._since_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """A connection was made, or the first byte of its next request has come."""
        self._since_s = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._header_s, self._look)

    def complete(self) -> None:
        """The head is here."""
        self._since_s = None

    def stop(self) -> None:
        """The connection is gone."""
        self._since_s = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self._since_s is None:
            return
        left_s = self._since_s + self._header_s - self._loop.time()
        if left_s <= 0:
            self._on_late()
        else:
            self._timer = self._loop.call_later(left_s, self._look)
