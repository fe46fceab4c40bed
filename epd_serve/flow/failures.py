"""Failures of instances: whether another one may do better, and whose they are."""

from __future__ import annotations

from collections.abc import Collection

from msgspec import Struct

from epd_serve.errors import (
    DECODE_DRAINING,
    DRAINING,
    NO_ROOM,
    PREPARATION_FULL,
    REQUEST_ENDED,
    Conflict,
    InstanceFailed,
    InvalidRequest,
    Overloaded,
    ServeError,
    StageTimeout,
)
from epd_serve.protocol.wire import MediaRef
from epd_serve.routing.routes import Route, Router
from epd_serve.routing.table import InstanceRecord, InstanceTable
from epd_serve.types import Stage


def is_planned(failure: ServeError) -> bool:
    """Whether an instance only leaves its role: nothing speaks against it, nor against another attempt."""
    return failure.code in (DRAINING, DECODE_DRAINING)


def may_help(failure: ServeError) -> bool:
    """Whether another instance may do better."""
    return failure.status >= 500 or isinstance(failure, Overloaded | Conflict)


def leaver(route: Route, stage: Stage, failure: ServeError) -> str:
    """Whom a request must not be sent to again after the instance of a stage broke off its answer."""
    is_decodes = stage is Stage.DECODE or failure.code == DECODE_DRAINING
    return (route.decode if is_decodes else route.prefill).name


def blamed(route: Route, stage: Stage, failure: ServeError) -> str:
    """Return the instance to blame when the live instance of a stage answers with an error."""
    if stage is Stage.PREFILL:
        is_decodes = isinstance(failure, InstanceFailed) or failure.code in (NO_ROOM, REQUEST_ENDED)
        return (route.decode if is_decodes else route.prefill).name
    return (route.prefill if isinstance(failure, StageTimeout) else route.decode).name


class TryHistory(Struct, eq=False):
    """The tries of a request so far; each of its choices that goes on by itself goes on from there.

    It avoids instances that failed it, until they are other processes, have another role, or return after they
    were down.

    Attributes:
        num_attempts: those that count.
        failure: of the last attempt, where other instances may do better.
        lives: the instances that failed it, each with its ``num_lives`` at that time.
        lost: instances to which a connection failed, the gateway's or that of P; others are preferred.
    """

    table: InstanceTable
    num_attempts: int = 0
    failure: ServeError | None = None
    lives: dict[str, tuple[InstanceRecord, int]] = {}
    lost: set[str] = set()

    def avoid(self, names: Collection[str]) -> None:
        """Send the request to these instances no more."""
        for name in names:
            if (record := self.table.get(name)) is not None:
                self.lives[name] = record, record.num_lives

    def avoided(self) -> set[str]:
        """Return the names of the instances that the request is not sent to."""
        return {
            name
            for name, (record, num_lives) in self.lives.items()
            if self.table.get(name) is record and record.num_lives == num_lives
        }

    def split(self) -> TryHistory:
        """For one choice: attempts of its own from now on; what fails one choice all of them avoid."""
        return TryHistory(self.table, self.num_attempts, self.failure, self.lives, self.lost)


#: Encoders that may leave one item without an answer before P encodes it itself.
_MAX_STALLED = 2


class ItemEncode(Struct, eq=False):
    """Who encodes one item of a try: a medium of the request, the one in that place, or a segment of it.

    P waits for the feature for twice the first ``patience_s``. An E that gives no answer may take half of that,
    the next half of the rest; what is left then is for P, however many more encoders there are, and P itself says
    when it is over.
    """

    ref: MediaRef
    place: int
    param: str | None
    encoder: InstanceRecord
    patience_s: float
    num_stalled: int = 0
    tried: set[str] = set()

    def stalled(self) -> None:
        """The encoder gave no answer in its time."""
        self.num_stalled += 1
        self.patience_s /= 2

    def next_encoder(
        self, router: Router, table: InstanceTable, prefill: InstanceRecord, failure: ServeError
    ) -> None:
        """Another one after a failure, at last P itself, which loads the tower for it.

        Raises ServeError where nobody is left; the failure itself where the item is wrong, P leaves its role, or
        encoders are only too busy, which P does not take over.
        """
        if isinstance(failure, InvalidRequest):
            failure.param = failure.param or self.param
            raise failure
        self.tried.add(self.encoder.name)
        encoder = prefill
        if self.num_stalled < _MAX_STALLED:
            [encoder] = router.encoders.choose_encoders(table, prefill, [self.ref], exclude=self.tried)
        is_tried = encoder.name in self.tried
        if failure.code == PREPARATION_FULL and (is_tried or Stage.ENCODE not in encoder.stages):
            raise failure
        if is_tried:
            if is_planned(failure):
                raise failure
            raise InstanceFailed(f"the image could not be encoded: {failure.message}", param=self.param)
        self.encoder = encoder
