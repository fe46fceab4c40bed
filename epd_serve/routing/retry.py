"""Decisions after a failure: which instances to avoid, how long to wait, and when to fail the request.

Pure, with the time as an argument; the gateway and the simulator share it.
"""

from __future__ import annotations

from msgspec import Struct

from epd_serve.errors import (
    CHOICES_LOST,
    DECODE_DRAINING,
    DRAINING,
    NO_ROOM,
    PEER_UNREACHABLE,
    PREPARATION_FULL,
    REQUEST_ENDED,
    Conflict,
    InstanceFailed,
    InstanceLost,
    InvalidRequest,
    Overloaded,
    ServeError,
    StageTimeout,
    Unavailable,
)
from epd_serve.protocol.wire import MediaRef
from epd_serve.routing.encoders import choose_encoders
from epd_serve.routing.routes import Demand, Route, RoutePolicy
from epd_serve.routing.table import InstanceRecord, InstanceTable
from epd_serve.types import Stage

_P, _D = Stage.PREFILL, Stage.DECODE
#: Attempts of a request in total, before and after its first token.
MAX_ATTEMPTS = 5
#: Attempts that may end because an instance leaves its role; they do not count as failed.
_MAX_PLANNED = 50
#: Interval at which a waiting request looks for an instance.
LOOK_AGAIN_S = 0.05
#: Time for D to report why P failed.
EXPLAIN_S = 0.5


class CallFailed(Exception):
    """The call to P or D failed, which ends the attempt; ``began`` if its answer had begun."""

    def __init__(self, stage: Stage, error: ServeError, *, began: bool = False) -> None:
        super().__init__(error.message)
        self.stage = stage
        self.error = error
        self.began = began


def is_planned(error: ServeError) -> bool:
    """Return whether an instance is only leaving its role."""
    return error.code in (DRAINING, DECODE_DRAINING)


def explains(error: ServeError, failure: ServeError) -> bool:
    """Return whether D's error is the cause of P's failure; a lost connection to P has another cause."""
    return failure.code == REQUEST_ENDED or isinstance(error, InstanceFailed) or is_planned(error)


def find_culprit(route: Route, failure: CallFailed) -> InstanceRecord:
    """Return the instance to avoid after a failed call: P reports errors of D, and D those of P."""
    stage, error = failure.stage, failure.error
    if error.code in (PEER_UNREACHABLE, DECODE_DRAINING):  # try another D with the same P
        return route.decode
    if not failure.began and not isinstance(error, InstanceLost):
        if stage is _D:
            return route.prefill if isinstance(error, StageTimeout) else route.decode
        if isinstance(error, InstanceFailed) or error.code in (NO_ROOM, REQUEST_ENDED):
            return route.decode
    return route.at(stage)


class Retry:
    """The attempts of one request.

    Attributes:
        generated: tokens that the client has; the next attempt continues after them.
    """

    def __init__(self, table: InstanceTable, policy: RoutePolicy, model: str, demand: Demand) -> None:
        self._table = table
        self._policy = policy
        self._model = model
        self._demand = demand
        self.generated: list[int] = []
        self._num_attempts = self._num_planned = 0
        self._error: ServeError | None = None  # of the last attempt
        self._avoided: dict[str, tuple[InstanceRecord, int]] = {}  # with num_lives at that time
        self._lost: set[str] = set()  # their connection failed: used only without an alternative
        self._until_s: float | None = None  # deadline of waiting for an instance
        self._is_awaited = False

    def pick_route(self, now_s: float, wait_s: float, complete_at_s: float | None) -> Route | None:
        """Return P and D for the next attempt, or None while the request must wait for an instance.

        Raises ServeError if no instance is expected, or none became ready in time.

        Args:
            wait_s: limit of waiting after a failed attempt, or after ``complete_at_s``.
            complete_at_s: when each stage last had an instance, if ever.
        """
        if self._until_s is None:
            expected_s = 0.0 if complete_at_s is None else complete_at_s + wait_s - now_s
            self._is_awaited = expected_s > 0
            self._until_s = now_s + (expected_s if self._error is None else wait_s)
        avoided = {
            name
            for name, (record, num_lives) in self._avoided.items()
            if self._table.get(name) is record and record.num_lives == num_lives
        }
        missing: ServeError
        for exclude in (avoided | self._lost, avoided):
            try:
                route = self._policy.choose_route(self._table, self._model, exclude=exclude, demand=self._demand)
            except Unavailable as error:
                missing = error
            else:
                self._until_s = None
                return route
        may_come = self._may_come(avoided)
        if may_come and now_s < self._until_s:
            return None
        if self._error is None:
            raise missing
        if may_come and wait_s:
            raise self._error.with_more(f"no instance could take over within {wait_s:.3g} s")
        raise self._error

    def _may_come(self, avoided: set[str]) -> bool:
        """Return whether an instance of each stage is up or may come up."""
        for stage in (_P, _D):
            known = [record for record in self._table if stage in record.stages]
            up = {record.name for record in self._table.ready(stage, self._model)}
            is_down = any(record.name not in up for record in known)
            if not (up - avoided or is_down or (self._is_awaited and not known)):
                return False
        return True

    def fail_attempt(
        self, route: Route, failure: CallFailed, *, begun: bool = False, generated: list[int] | None = None
    ) -> None:
        """Record a failed attempt; return if another may follow, else raise the request's error.

        Args:
            begun: whether the client has received a part of the answer.
            generated: all tokens that the client has; None if unknown or of several choices.
        """
        error, culprit = failure.error, find_culprit(route, failure)
        if error.status < 500 and not isinstance(error, Overloaded | Conflict):
            raise error
        if is_planned(error):
            self._num_planned += 1
            self._table.mark_lost(culprit.name)  # until it accepts requests again
        elif error.code == PEER_UNREACHABLE or isinstance(error, InstanceLost):
            self._lost.add(culprit.name)
        else:
            self._avoided[culprit.name] = culprit, culprit.num_lives
        self._num_attempts += not is_planned(error) or self._num_planned > _MAX_PLANNED
        if self._num_attempts >= MAX_ATTEMPTS:
            raise error
        if begun and self._demand.num_sequences > 1:
            raise InstanceFailed(
                f"{error.message}; a stream of several choices (n > 1) cannot continue at another instance: "
                "send the request again",
                code=CHOICES_LOST,
            )
        if begun and generated is None:
            raise error
        self._error = error
        if generated is not None:
            self.generated = generated


class ItemEncoders(Struct, eq=False):
    """The attempts to encode one item, at one instance after another. An instance that works may take any time.

    Attributes:
        param: the field of the request that holds the item.
        encoder: the current instance.
    """

    ref: MediaRef
    param: str | None
    encoder: InstanceRecord
    _tried: set[str] = set()

    def pick_next(self, table: InstanceTable, prefill: InstanceRecord, error: ServeError) -> None:
        """Select the next encoder after a failure; the last one is P itself, which then loads the tower.

        Raises the request's error if the item is invalid, no instance is left, or the encoders are only busy.
        """
        if isinstance(error, InvalidRequest):
            error.param = error.param or self.param
            raise error
        self._tried.add(self.encoder.name)
        [encoder] = choose_encoders(table, prefill, [self.ref], exclude=self._tried)
        is_tried = encoder.name in self._tried
        if error.code == PREPARATION_FULL and (is_tried or Stage.ENCODE not in encoder.stages):
            raise error
        if is_tried:
            if is_planned(error):
                raise error
            raise InstanceFailed(f"the image could not be encoded: {error.message}", param=self.param)
        self.encoder = encoder
