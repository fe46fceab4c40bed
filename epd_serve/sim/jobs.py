"""A simulated request under way, and one try of it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from epd_serve.request import Sequence
from epd_serve.routing.policy import Route
from epd_serve.sim.instance import Reservation
from epd_serve.sim.request import SimRequest


@dataclass(slots=True, eq=False)
class Job:
    """A request under way. Times are the clock's; None: not yet."""

    number: int
    request: SimRequest
    num_tokens: int
    sent_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    finish_s: float | None = None
    num_output: int = 0
    token_times_s: list[float] = field(default_factory=list)
    failure: str = ""
    num_retries: int = 0
    encoded_s: float | None = None


@dataclass(slots=True, eq=False)
class Attempt:
    """A job on its route; another one where an instance dies."""

    job: Job
    id: str
    route: Route
    sequence: Sequence
    calls: list[AbstractContextManager[Any]] = field(default_factory=list)
    encodes: list[AbstractContextManager[Any]] = field(default_factory=list)
    instances: set[str] = field(default_factory=set)
    blocks: Any = None
    reservation: Reservation | None = None
    begun_s: float = 0.0
    is_over: bool = False
    is_expected: bool = False
    is_sent: bool = False
    num_before: int = 0

    def close(self) -> None:
        for call in (*self.calls, *self.encodes):
            call.__exit__(None, None, None)
        self.calls.clear()
        self.encodes.clear()
        self.is_over = True
        if self.reservation is not None:
            self.reservation.is_over = True
