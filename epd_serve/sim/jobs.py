"""A simulated request under way, and one try of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from epd_serve.flow.events import Event
from epd_serve.flow.request import Asked, Fleet, RequestFlow
from epd_serve.request import Sequence
from epd_serve.routing.policy import Route
from epd_serve.routing.record import Encoding, OpenCall
from epd_serve.sim.instance import Reservation
from epd_serve.sim.request import SimRequest
from epd_serve.types import Stage


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
    """A request on one route. ``calls`` are those to P and D, ``encodes`` go by the items; ``instances`` have
    something of it."""

    run: SimRun
    id: str
    route: Route
    sequence: Sequence
    calls: dict[Stage, OpenCall] = field(default_factory=dict)
    encodes: dict[int, Encoding] = field(default_factory=dict)
    instances: dict[str, None] = field(default_factory=dict)
    blocks: Any = None
    reservation: Reservation | None = None
    is_expected: bool = False
    is_over: bool = False
    num_before: int = 0


class SimRun:
    """A job on its way, over all attempts; also how far its answer has come, for its flow."""

    def __init__(self, fleet: Fleet, job: Job, asked: Asked) -> None:
        self.job = job
        self.flow = RequestFlow(fleet, asked, self)
        self.attempt: Attempt | None = None
        self.complete = False
        self.events: list[Event] = []
        self.is_feeding = False

    @property
    def begun(self) -> bool:
        return self.job.first_token_s is not None

    def tokens_of_each(self) -> list[list[int]]:
        """As many as there are."""
        return [[0] * self.num_output()]

    def num_output(self) -> int:
        return 0 if self.attempt is None else self.attempt.num_before + len(self.attempt.sequence.output_ids)
